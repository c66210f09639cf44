//! Numbers and strings as the text opcodes of protocols 0 and 1 spell them.

use crate::base::limits::LIMITS;

/// A decimal integer as little-endian two's complement.
pub(super) fn integer(text: &[u8]) -> Option<Vec<u8>> {
    let (negative, digits) = match text {
        [b'-', digits @ ..] => (true, digits),
        [b'+', digits @ ..] => (false, digits),
        digits => (false, digits),
    };
    let is_number = !digits.is_empty() && digits.iter().all(u8::is_ascii_digit);
    if !is_number || digits.len() > LIMITS.pickle_digits {
        return None;
    }
    let mut bytes = Vec::new();
    for digit in digits {
        let mut carry = u16::from(digit - b'0');
        for byte in &mut bytes {
            let [low, high] = (u16::from(*byte) * 10 + carry).to_le_bytes();
            *byte = low;
            carry = high.into();
        }
        if carry > 0 {
            bytes.push(carry.to_le_bytes()[0]);
        }
    }
    bytes.push(0);
    if negative {
        let mut carry = true;
        for byte in &mut bytes {
            let (value, overflows) = (!*byte).overflowing_add(carry.into());
            *byte = value;
            carry = overflows;
        }
    }
    Some(bytes)
}

/// The bytes that a Python 2 string literal with its quotes stands for (`repr` of a `str`).
pub(super) fn quoted(line: &[u8]) -> Option<Vec<u8>> {
    let ([b'\'', inner @ .., b'\''] | [b'"', inner @ .., b'"']) = line.trim_ascii_end() else {
        return None;
    };
    let mut bytes = Vec::with_capacity(inner.len());
    let mut rest = inner;
    while let [first, after @ ..] = rest {
        rest = after;
        if *first != b'\\' {
            bytes.push(*first);
            continue;
        }
        let (&escape, after) = rest.split_first()?;
        rest = after;
        match escape {
            b'\\' | b'\'' | b'"' => bytes.push(escape),
            b'a' => bytes.push(0x07),
            b'b' => bytes.push(0x08),
            b'f' => bytes.push(0x0c),
            b'n' => bytes.push(b'\n'),
            b'r' => bytes.push(b'\r'),
            b't' => bytes.push(b'\t'),
            b'v' => bytes.push(0x0b),
            b'x' => {
                let (value, after) = number(rest, 2, 16)?;
                bytes.push(u8::try_from(value).ok()?);
                rest = after;
            }
            b'0'..=b'7' => {
                let digits = rest.iter().take(2).take_while(|digit| (b'0'..=b'7').contains(digit));
                let count = digits.count();
                let (low, after) = number(rest, count, 8)?;
                let value = (u32::from(escape - b'0') << (3 * count)) | low;
                // Python keeps the low eight bits of \400 to \777.
                bytes.push(value.to_le_bytes()[0]);
                rest = after;
            }
            // Python keeps the backslash of an escape that it does not know.
            other => bytes.extend([b'\\', other]),
        }
    }
    Some(bytes)
}

/// Python's raw-unicode-escape as UTF-8: Latin-1 but for `\uXXXX` and `\UXXXXXXXX`. Surrogates come out as the
/// three bytes that UTF-8 would have for them, which makes the whole no valid text.
pub(super) fn raw_unicode(line: &[u8]) -> Option<Vec<u8>> {
    let mut bytes = Vec::with_capacity(line.len());
    let mut rest = line;
    while let [first, after @ ..] = rest {
        rest = after;
        let code = match (*first, rest) {
            (b'\\', [kind @ (b'u' | b'U'), after @ ..]) => {
                let (code, after) = number(after, if *kind == b'u' { 4 } else { 8 }, 16)?;
                rest = after;
                code
            }
            (b'\\', [other, after @ ..]) => {
                rest = after;
                bytes.push(b'\\');
                u32::from(*other)
            }
            (byte, _) => u32::from(byte),
        };
        match char::from_u32(code) {
            Some(char) => bytes.extend_from_slice(char.encode_utf8(&mut [0; 4]).as_bytes()),
            None if code <= 0xffff => {
                let [low, high] = u16::try_from(code).ok()?.to_le_bytes();
                bytes.extend([
                    0xe0 | (high >> 4),
                    0x80 | ((high & 0x0f) << 2) | (low >> 6),
                    0x80 | (low & 0x3f),
                ]);
            }
            None => return None,
        }
    }
    Some(bytes)
}

/// Exactly `count` digits, and what follows them.
fn number(text: &[u8], count: usize, radix: u32) -> Option<(u32, &[u8])> {
    let (digits, rest) = text.split_at_checked(count)?;
    let value = digits.iter().try_fold(0_u32, |value, &digit| {
        value.checked_mul(radix)?.checked_add(char::from(digit).to_digit(radix)?)
    })?;
    Some((value, rest))
}

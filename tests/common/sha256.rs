//! SHA-256 (FIPS 180-4), for small inputs.

/// The fractional parts of the `root`-th roots of the first primes, 32 bits of each.
fn constants<const N: usize>(root: u32) -> [u32; N] {
    let is_prime = |n: &u128| (2..*n).take_while(|d| d * d <= *n).all(|d| !n.is_multiple_of(d));
    let mut primes = (2_u128..).filter(is_prime);
    std::array::from_fn(|_| {
        let scaled = primes.next().unwrap() << (32 * root);
        // The largest integer whose power is at most the prime, both scaled by 2^32 to the power.
        let mut found = 0_u128;
        for bit in (0..37).rev() {
            let next = found | 1 << bit;
            if next.pow(root) <= scaled {
                found = next;
            }
        }
        u32::try_from(found & 0xffff_ffff).unwrap()
    })
}

/// The digest in hexadecimal digits.
pub(crate) fn hex(message: &[u8]) -> String {
    let k: [u32; 64] = constants(3);
    let mut state: [u32; 8] = constants(2);
    let mut padded = message.to_vec();
    padded.push(0x80);
    while padded.len() % 64 != 56 {
        padded.push(0);
    }
    padded.extend((message.len() as u64 * 8).to_be_bytes());
    for block in padded.chunks_exact(64) {
        let mut w = [0_u32; 64];
        for (word, bytes) in w.iter_mut().zip(block.chunks_exact(4)) {
            *word = u32::from_be_bytes(bytes.try_into().unwrap());
        }
        for i in 16..64 {
            let (x, y) = (w[i - 15], w[i - 2]);
            let s0 = x.rotate_right(7) ^ x.rotate_right(18) ^ (x >> 3);
            let s1 = y.rotate_right(17) ^ y.rotate_right(19) ^ (y >> 10);
            w[i] = w[i - 16].wrapping_add(s0).wrapping_add(w[i - 7]).wrapping_add(s1);
        }
        let [mut a, mut b, mut c, mut d, mut e, mut f, mut g, mut h] = state;
        for i in 0..64 {
            let s1 = e.rotate_right(6) ^ e.rotate_right(11) ^ e.rotate_right(25);
            let choice = (e & f) ^ (!e & g);
            let t1 = h.wrapping_add(s1).wrapping_add(choice).wrapping_add(k[i]).wrapping_add(w[i]);
            let s0 = a.rotate_right(2) ^ a.rotate_right(13) ^ a.rotate_right(22);
            let t2 = s0.wrapping_add((a & b) ^ (a & c) ^ (b & c));
            (h, g, f, e, d, c, b, a) = (g, f, e, d.wrapping_add(t1), c, b, a, t1.wrapping_add(t2));
        }
        for (sum, add) in state.iter_mut().zip([a, b, c, d, e, f, g, h]) {
            *sum = sum.wrapping_add(add);
        }
    }
    state.iter().map(|word| format!("{word:08x}")).collect()
}

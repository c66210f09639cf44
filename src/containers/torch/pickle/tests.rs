//! One case for each opcode and for each way to be wrong; bytes as CPython 3.11 writes or reads them.

#![expect(clippy::unwrap_used, reason = "tests")]

use super::*;
use crate::containers::torch::Value;

/// A value spelt in full, down to `depth` levels.
fn spell(pickle: &Pickle, id: ValueId, depth: usize) -> String {
    let values = &pickle.values;
    if depth == 0 {
        return "..".to_owned();
    }
    let list = |ids: &[ValueId]| {
        ids.iter().map(|&id| spell(pickle, id, depth - 1)).collect::<Vec<_>>().join(", ")
    };
    let pairs = |pairs: &[(ValueId, ValueId)]| {
        let pair =
            |&(k, v)| format!("{}: {}", spell(pickle, k, depth - 1), spell(pickle, v, depth - 1));
        pairs.iter().map(pair).collect::<Vec<_>>().join(", ")
    };
    match values.get(id) {
        Value::None => "None".to_owned(),
        Value::Bool(value) => value.to_string(),
        Value::Int(value) => value.to_string(),
        Value::BigInt(bytes) => format!("big{bytes:02x?}"),
        Value::Float(value) => format!("{value:?}"),
        Value::Str(text) => format!("{text:?}"),
        Value::Bytes(bytes) => format!("b{:?}", bytes.escape_ascii().to_string()),
        Value::Tuple(members) => format!("({})", list(members)),
        Value::List(members) => format!("[{}]", list(members)),
        Value::Dict(items) => format!("{{{}}}", pairs(items)),
        Value::Set(members) => format!("set({})", list(members)),
        Value::FrozenSet(members) => format!("frozenset({})", list(members)),
        Value::Global { module, name } => format!("{module}.{name}"),
        Value::Persistent(id) => format!("@{}", spell(pickle, id, depth - 1)),
        Value::Call(call) => {
            let mut text = spell(pickle, call.callable, depth - 1);
            text += &spell(pickle, call.args, depth - 1);
            for (sign, extra) in [("**", call.kwargs), ("|", call.state)] {
                if let Some(extra) = extra {
                    text += &format!("{sign}{}", spell(pickle, extra, depth - 1));
                }
            }
            if !call.items.is_empty() {
                text += &format!("{{{}}}", pairs(call.items));
            }
            if !call.appends.is_empty() {
                text += &format!("[{}]", list(call.appends));
            }
            text
        }
    }
}

#[track_caller]
fn check(input: &[u8], expect: &str) {
    let pickle = read(input).unwrap();
    assert_eq!(spell(&pickle, pickle.root, 6), expect);
    assert_eq!(pickle.consumed, input.len());
}

#[track_caller]
fn rejects(input: &[u8], at: u64, kind: PickleErrorKind) {
    assert_eq!(read(input).unwrap_err(), PickleError { at, kind });
}

#[test]
fn constants_and_binary_numbers() {
    check(b"N.", "None");
    check(b"\x80\x02\x88.", "true");
    check(b"\x80\x05\x89.", "false");
    check(b"K\xff.", "255");
    check(b"M\xff\xff.", "65535");
    check(b"J\xfe\xff\xff\xff.", "-2");
    check(b"G\x3f\xf8\0\0\0\0\0\0.", "1.5");
    check(b"\x8a\x00.", "0");
    check(b"\x8a\x01\xff.", "-1");
    check(b"\x8a\x08\0\0\0\0\0\0\0\x80.", "-9223372036854775808");
    check(b"\x8a\x09\0\0\0\0\0\0\0\x80\0.", "big[00, 00, 00, 00, 00, 00, 00, 80, 00]");
    check(b"\x8b\x02\0\0\0\x39\x30.", "12345");
    // Padded with the sign, as nobody writes it: still the same value.
    check(b"\x8a\x0a\x05\0\0\0\0\0\0\0\0\0.", "5");
    check(b"\x8a\x0a\x80\xff\xff\xff\xff\xff\xff\xff\xff\xff.", "-128");
}

#[test]
fn text_numbers() {
    check(b"I-12\n.", "-12");
    check(b"I01\n.", "true");
    check(b"I00\n.", "false");
    check(b"L123L\n.", "123");
    check(b"L9223372036854775808L\n.", "big[00, 00, 00, 00, 00, 00, 00, 80, 00]");
    check(b"L-9223372036854775809L\n.", "big[ff, ff, ff, ff, ff, ff, ff, 7f, ff]");
    check(b"L-256\n.", "-256");
    check(b"F1e-05\n.", "1e-5");
    check(b"Fnan\n.", "NaN");
    check(b"F-inf\n.", "-inf");
}

#[test]
fn strings_of_every_opcode() {
    check(b"U\x02ab.", r#""ab""#);
    check(b"T\x03\0\0\0caf.", r#""caf""#);
    check(b"X\x02\0\0\0\xc3\xa9.", r#""é""#);
    check(b"\x8c\x02\xc3\xa9.", r#""é""#);
    check(b"\x8d\x01\0\0\0\0\0\0\0z.", r#""z""#);
    check(b"S'a\\'b\\n\\x41\\101\\q\\\\'\n.", r#""a'b\nAA\\q\\""#);
    check(b"S\"it's\"\n.", r#""it's""#);
    check(b"S'\\400'\n.", r#""\0""#);
    check(b"Va\\u20ac\\\\u\\U0001f600\xe9\n.", r#""a€\\\\u😀é""#);
    check(b"C\x01\xff.", r#"b"\\xff""#);
    check(b"B\x01\0\0\0a.", r#"b"a""#);
    check(b"\x8e\x01\0\0\0\0\0\0\0a.", r#"b"a""#);
    check(b"\x96\x01\0\0\0\0\0\0\0a.", r#"b"a""#);
}

#[test]
fn what_is_no_utf8_is_kept_as_bytes() {
    check(b"U\x01\xff.", r#"b"\\xff""#);
    check(b"S'\\xff'\n.", r#"b"\\xff""#);
    check(b"X\x03\0\0\0\xed\xb2\x80.", r#"b"\\xed\\xb2\\x80""#);
    check(b"V\\udc80\n.", r#"b"\\xed\\xb2\\x80""#);
}

#[test]
fn containers_of_every_opcode() {
    check(b").", "()");
    check(b"(I1\nI2\nt.", "(1, 2)");
    check(b"N\x85.", "(None)");
    check(b"NK\x01\x86.", "(None, 1)");
    check(b"NK\x01K\x02\x87.", "(None, 1, 2)");
    check(b"].", "[]");
    check(b"(K\x01K\x02l.", "[1, 2]");
    check(b"]K\x01a(K\x02K\x03e.", "[1, 2, 3]");
    check(b"}.", "{}");
    check(b"(K\x01Nd.", "{1: None}");
    check(b"}K\x01Ns(K\x02NK\x01Nu.", "{1: None, 2: None, 1: None}");
    check(b"\x8f(K\x01K\x02\x90.", "set(1, 2)");
    check(b"(K\x01\x91.", "frozenset(1)");
}

#[test]
fn stack_and_memo() {
    check(b"NK\x010.", "None");
    check(b"](K\x01K\x021.", "[]");
    check(b"](0.", "[]");
    check(b"K\x012\x86.", "(1, 1)");
    check(b"]p7\ng7\n\x86.", "([], [])");
    check(b"]q\x05h\x05\x86.", "([], [])");
    check(b"]r\0\0\0\xeej\0\0\0\xee\x86.", "([], [])");
    check(b"]\x94}\x94h\x00\x87.", "([], {}, [])");
    check(b"\x80\x04\x95\x02\0\0\0\0\0\0\0N.", "None");
}

#[test]
fn memoize_counts_entries_and_not_indices() {
    // PUT 5 is the first entry, so MEMOIZE makes entry 1.
    check(b"]q\x05}\x94h\x01\x87.", "([], {}, {})");
}

#[test]
fn objects_of_every_opcode() {
    check(b"cos\nsystem\n.", "os.system");
    check(b"\x8c\x01a\x8c\x03B.C\x93.", "a.B.C");
    check(b"cos\nsystem\n(S'id'\ntR.", r#"os.system("id")"#);
    check(b"ca\nB\n)\x81.", "a.B()");
    check(b"ca\nB\n)}\x8c\x01xNs\x92.", r#"a.B()**{"x": None}"#);
    check(b"(K\x01ia\nB\n.", "a.B(1)");
    check(b"(ca\nB\nK\x01o.", "a.B(1)");
    check(b"ca\nB\n)R}b.", "a.B()|{}");
    check(b"ca\nB\n)RK\x01Ns(K\x02Nu.", "a.B(){1: None, 2: None}");
    check(b"ca\nB\n)RK\x01a(K\x02e(K\x03\x90.", "a.B()[1, 2, 3]");
    check(b"Pstorage 1\n.", r#"@"storage 1""#);
    check(b"\x8c\x01kQ.", r#"@"k""#);
    check(b"ca\nB\n)R)R.", "a.B()()");
}

#[test]
fn identity_is_kept_and_cycles_are_no_trouble() {
    let list = read(b"]q\x00h\x00a.").unwrap();
    let Value::List(members) = list.values.get(list.root) else { unreachable!() };
    assert_eq!(members, [list.root]);

    let dict = read(b"}q\x00\x8c\x01kh\x00s.").unwrap();
    assert_eq!(dict.values.dict_get(dict.root, "k"), Some(dict.root));

    let pair = read(b"]q\x00h\x00]\x87.").unwrap();
    let Value::Tuple(&[first, again, other]) = pair.values.get(pair.root) else { unreachable!() };
    assert_eq!(first, again);
    assert_ne!(first, other);
}

#[test]
fn a_bomb_of_references_stays_small() {
    // Thirty lists, each of which holds the one before ten times: 10^30 leaves for whoever copies.
    let mut bomb = b"]q\x00".to_vec();
    for level in 0..30 {
        bomb.extend(b"](");
        bomb.extend([b'h', level].repeat(10));
        bomb.extend([b'e', b'q', level + 1]);
    }
    bomb.push(b'.');
    let bomb = read(&bomb).unwrap();
    assert_eq!(bomb.values.ids().count(), read(b"].").unwrap().values.ids().count() + 30);
    assert_eq!(bomb.values.sequence(bomb.root).unwrap().count(), 10);
}

#[test]
fn a_million_levels_need_no_stack() {
    const LEVELS: usize = 1_000_000;
    let nested = |start: &[u8], open: &[u8], close: &[u8]| {
        [start, &open.repeat(LEVELS), &close.repeat(LEVELS), b"."].concat()
    };
    rejects(&nested(b"", b"(", b""), LEVELS as u64, PickleErrorKind::StackUnderflow);
    for input in [
        nested(b"]", b"]", b"a"),
        nested(b"N", b"(", b"t"),
        nested(b"N", b"", b"\x85"),
        nested(b"ca\nB\n", b"", b")R"),
        nested(b"N", b"", b"Q"),
    ] {
        let pickle = read(&input).unwrap();
        assert!(pickle.values.ids().count() > LEVELS);
        assert_eq!(pickle.values.class_name(pickle.root), None);
        drop(pickle);
    }
}

#[test]
fn several_pickles_in_a_row_are_told_apart() {
    let input = b"\x80\x02K\x01.\x80\x02K\x02.rest";
    let first = read(input).unwrap();
    let second = read(&input[first.consumed..]).unwrap();
    assert_eq!((first.consumed, second.consumed), (5, 5));
    assert_eq!(second.values.as_u64(second.root), Some(2));
}

#[test]
fn a_forged_memo_index_takes_no_memory() {
    let before = read(b"Nr\xff\xff\xff\xff.").unwrap();
    assert!(before.values.is_none(before.root));
    check(b"]p4294967295\ng4294967295\n\x86.", "([], [])");
}

#[test]
fn an_entry_put_ahead_and_again_counts_once() {
    // 255 is ahead of the input when it is put first, and a plain index when it is put again.
    let input =
        [b"]q\xff", b"N0".repeat(200).as_slice(), b"}q\xff\x94h\xffh\x01\x86\x86\x86."].concat();
    check(&input, "([], ({}, ({}, {})))");
}

#[test]
fn rejects_input_that_ends_anywhere() {
    let whole =
        b"\x80\x04\x95\x16\0\0\0\0\0\0\0}\x8c\x01a\x8a\x02\x00\x01s\x8c\x01bX\x03\0\0\0abcs.";
    read(whole).unwrap();
    for len in 0..whole.len() {
        let error = read(&whole[..len]).unwrap_err();
        assert_eq!(error.kind, PickleErrorKind::UnexpectedEnd, "{len} bytes: {error}");
    }
}

#[test]
fn rejects_lengths_beyond_the_input() {
    for input in [
        &b"B\xff\xff\xff\xff"[..],
        b"X\xff\xff\xff\x7f",
        b"\x8d\xff\xff\xff\xff\xff\xff\xff\xff",
        b"\x8e\0\0\0\0\0\0\0\x80",
        b"\x96\xff\xff\xff\xff\xff\xff\xff\x7f",
        b"\x8b\xff\xff\xff\x7f",
        b"\x95\xff\xff\xff\xff\xff\xff\xff\xff",
        b"S'no end",
        b"cno\nend",
    ] {
        rejects(input, 0, PickleErrorKind::UnexpectedEnd);
    }
}

#[test]
fn rejects_what_is_no_pickle() {
    rejects(b"{}", 0, PickleErrorKind::UnknownOpcode(b'{'));
    rejects(b"N\xff", 1, PickleErrorKind::UnknownOpcode(0xff));
    rejects(b"\x80\x06.", 0, PickleErrorKind::UnknownProtocol(6));
}

#[test]
fn rejects_what_is_outside_the_file() {
    rejects(b"\x82\x01.", 0, PickleErrorKind::OutsideTheFile("EXT1"));
    rejects(b"\x83\x01\0.", 0, PickleErrorKind::OutsideTheFile("EXT2"));
    rejects(b"\x84\x01\0\0\0.", 0, PickleErrorKind::OutsideTheFile("EXT4"));
    rejects(b"\x97.", 0, PickleErrorKind::OutsideTheFile("NEXT_BUFFER"));
    rejects(b"N\x98.", 1, PickleErrorKind::OutsideTheFile("READONLY_BUFFER"));
}

#[test]
fn rejects_an_empty_stack() {
    for input in [&b"."[..], b"0", b"2", b"\x85", b"q\x00", b"R", b"a", b"s", b"b", b"Q", b"\x93"] {
        rejects(input, 0, PickleErrorKind::StackUnderflow);
    }
    rejects(b"(e", 1, PickleErrorKind::StackUnderflow);
    rejects(b"](N(u", 4, PickleErrorKind::TypeMismatch { wanted: "a dict", found: "None" });
    rejects(b"](o", 2, PickleErrorKind::StackUnderflow);
}

#[test]
fn values_below_a_mark_are_out_of_reach() {
    rejects(b"N(.", 2, PickleErrorKind::StackUnderflow);
    rejects(b"N(\x85", 2, PickleErrorKind::StackUnderflow);
    rejects(b"](a", 2, PickleErrorKind::StackUnderflow);
    rejects(b"N(Na", 3, PickleErrorKind::StackUnderflow);
    rejects(b"]((e", 3, PickleErrorKind::StackUnderflow);
}

#[test]
fn rejects_a_missing_mark() {
    for input in [&b"Nt"[..], b"Nl", b"Nd", b"Ne", b"Nu", b"N\x90", b"N\x91", b"N1", b"No"] {
        rejects(input, 1, PickleErrorKind::NoMark);
    }
}

#[test]
fn rejects_memo_entries_that_were_never_made() {
    rejects(b"h\x03.", 0, PickleErrorKind::MissingMemo(3));
    rejects(b"j\xff\xff\xff\xff.", 0, PickleErrorKind::MissingMemo(u32::MAX));
    rejects(b"]q\x02h\x01.", 3, PickleErrorKind::MissingMemo(1));
}

#[test]
fn rejects_values_of_the_wrong_type() {
    let mismatch = |wanted, found| PickleErrorKind::TypeMismatch { wanted, found };
    rejects(b"NNa", 2, mismatch("a list", "None"));
    rejects(b"N(Ne", 3, mismatch("a list", "None"));
    rejects(b")NNs", 3, mismatch("a dict", "tuple"));
    rejects(b"](N\x90", 3, mismatch("a set", "list"));
    rejects(b"])R", 2, mismatch("a class or function", "list"));
    rejects(b"(No", 2, mismatch("a class or function", "None"));
    rejects(b"ca\nB\n]R", 6, mismatch("a tuple of arguments", "list"));
    rejects(b"ca\nB\n)]\x92", 7, mismatch("a dict of keyword arguments", "list"));
    rejects(b"]}b", 2, mismatch("an object", "list"));
    rejects(b"N\x8c\x01a\x93", 4, PickleErrorKind::BadText("the name of a class"));
}

#[test]
fn rejects_bad_text_and_numbers() {
    for (input, what) in [
        (&b"Ix\n"[..], "an integer"),
        (b"I\n", "an integer"),
        (b"L-L\n", "an integer"),
        (b"F1,5\n", "a float"),
        (b"Sno quotes\n", "a string"),
        (b"S'\n", "a string"),
        (b"S'\\x4'\n", "a string"),
        (b"S'\\'\n", "a string"),
        (b"V\\u12\n", "a unicode string"),
        (b"V\\U00110000\n", "a unicode string"),
        (b"g-1\n", "a memo index"),
        (b"g4294967296\n", "a memo index"),
    ] {
        rejects(input, 0, PickleErrorKind::BadText(what));
    }
    let long = [b"L".as_slice(), &b"9".repeat(5000), b"\n"].concat();
    rejects(&long, 0, PickleErrorKind::BadText("an integer"));
}

#[test]
fn rejects_the_rest() {
    rejects(b"}(Nu", 3, PickleErrorKind::OddItems);
    rejects(b"(Nd", 2, PickleErrorKind::OddItems);
    rejects(b"ca\nB\n)R}b}b", 10, PickleErrorKind::BuiltTwice);
    rejects(b"T\xff\xff\xff\xff", 0, PickleErrorKind::NegativeLength(-1));
    rejects(b"\x8b\0\0\0\x80", 0, PickleErrorKind::NegativeLength(i32::MIN));
}

#[test]
fn rejects_more_than_the_limits() {
    let limits = Limits { pickle_values: 100, ..LIMITS };
    let fails = |input: &[u8]| match read_within(input, &limits).unwrap_err().kind {
        PickleErrorKind::OverLimit(OverLimit { what, .. }) => what,
        other => unreachable!("{other}"),
    };
    assert_eq!(fails(&b"]".repeat(200)), "values");
    assert_eq!(fails(&b"N".repeat(200)), "values on its stack");
    assert_eq!(fails(&b"(".repeat(200)), "marks");
    assert_eq!(fails(&b"N0".repeat(500)), "references");
    read_within(&[&b"N0".repeat(300)[..], b"N."].concat(), &limits).unwrap();
}

//! Bounds decide as torch and numpy do, and casts are told from what only looks like one.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use ckptcmp::judge::bounds::Bounds;
use ckptcmp::judge::policy::{Policy, Rules};
use ckptcmp::judge::verdict::TensorVerdict;
use ckptcmp::report::Report;
use ckptcmp::{CompareOptions, OpenOptions, Verdict};

fn judged(a: &Path, b: &Path, policy: Policy) -> Report {
    let open = |path| ckptcmp::open(path, &OpenOptions::default()).unwrap();
    let options = CompareOptions { policy, ..CompareOptions::default() };
    ckptcmp::compare(open(a), open(b), &options).unwrap()
}

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/judging").join(name)
}

fn allowing_casts() -> Policy {
    Policy { bounds: Bounds { allow_cast: Some(true), ..Bounds::default() }, ..Policy::default() }
}

/// The bytes of a safetensors file, and where each tensor lies in it.
fn tensors(path: &Path) -> (Vec<u8>, serde_json::Value, usize) {
    let bytes = std::fs::read(path).unwrap();
    let len = usize::try_from(u64::from_le_bytes(*bytes.first_chunk().unwrap())).unwrap();
    let header = serde_json::from_slice(&bytes[8..8 + len]).unwrap();
    (bytes, header, 8 + len)
}

#[test]
fn every_cast_of_torch_is_one() {
    let [wide, narrow] = ["wide.safetensors", "narrow.safetensors"].map(fixture);
    for [a, b] in [[&wide, &narrow], [&narrow, &wide]] {
        let report = judged(a, b, allowing_casts());
        assert_eq!(report.tensors.len(), 56);
        for judged in &report.tensors {
            let (name, judgement) = (&judged.tensor.name, &judged.judgement);
            assert!(judgement.passes, "{name}: {judgement:?}");
            assert_eq!(judgement.verdict, TensorVerdict::Cast, "{name}");
        }
        assert_eq!(report.verdict, Verdict::Cast);
        let strict = judged(a, b, Policy::default());
        assert!(strict.tensors.iter().all(|judged| !judged.judgement.passes));
        assert_eq!(strict.verdict, Verdict::Different);
    }
}

#[test]
fn a_cast_with_one_other_element_is_none() {
    let [wide, narrow] = ["wide.safetensors", "narrow.safetensors"].map(fixture);
    let (mut bytes, header, data) = tensors(&narrow);
    let mut changed = 0;
    for tensor in header.as_object().unwrap().values() {
        let offsets = &tensor["data_offsets"];
        let [start, end] =
            [0, 1].map(|end| usize::try_from(offsets[end].as_u64().unwrap()).unwrap());
        let numel = tensor["shape"][0].as_u64().unwrap();
        let size = (end - start) / usize::try_from(numel).unwrap();
        // The 53rd is one of anything, and 0x40 in its last byte a high bit of the exponent.
        bytes[data + start + 54 * size - 1] ^= 0x40;
        changed += 1;
    }
    assert_eq!(changed, 56);
    let file = tempfile::Builder::new().suffix(".safetensors").tempfile().unwrap();
    std::fs::write(file.path(), &bytes).unwrap();
    let report = judged(&wide, file.path(), allowing_casts());
    for judged in &report.tensors {
        let (name, judgement) = (&judged.tensor.name, &judged.judgement);
        assert!(!judgement.passes, "{name}: {judgement:?}");
        assert_eq!(judgement.rounded.map(|(_, misses)| misses), Some(1), "{name}");
    }
}

#[test]
fn tolerances_hold_as_numpy_and_torch_have_them() {
    let [a, b] = ["close-a.safetensors", "close-b.safetensors"].map(fixture);
    let text = std::fs::read_to_string(fixture("close.toml")).unwrap();
    let rules: Rules = text.parse().unwrap();
    let report = judged(&a, &b, Policy { rules: rules.rules, ..Policy::default() });
    let lists = std::fs::read_to_string(fixture("close.json")).unwrap();
    let lists: serde_json::Value = serde_json::from_str(&lists).unwrap();
    let list =
        |key: &str| -> BTreeSet<String> { serde_json::from_value(lists[key].clone()).unwrap() };
    let passing = |judged: &&ckptcmp::report::Judged| judged.judgement.passes;
    let passing = report.tensors.iter().filter(passing);
    let passing: BTreeSet<String> = passing.map(|judged| judged.tensor.name.to_string()).collect();
    assert_eq!(report.tensors.len(), 2200);
    assert_eq!(passing, list("close"));
    // Those that torch decides otherwise in the dtype of the tensor are known, and few.
    assert_eq!(list("torch disagrees"), list("assert_close disagrees"));
    assert!(list("torch disagrees").len() < 120);
}

#[test]
fn bounds_of_flags_and_rules_decide_the_exit_code() {
    let [wide, narrow] = ["wide.safetensors", "narrow.safetensors"].map(fixture);
    let folder = tempfile::tempdir().unwrap();
    let rules = |text: &str| {
        let path = folder.path().join("rules.toml");
        std::fs::write(&path, text).unwrap();
        path.to_str().unwrap().to_owned()
    };
    let run = |args: &[&str]| {
        let sides = [wide.to_str().unwrap(), narrow.to_str().unwrap()];
        let done = crate::common::ckptcmp()
            .arg("compare")
            .args(sides)
            .args(args)
            .args(["-o", "-"])
            .output();
        let done = done.unwrap();
        (done.status.code(), String::from_utf8(done.stderr).unwrap())
    };
    let few = ["--include", "float32.bfloat16", "--include", "float16.float32"];
    let with = |more: &[&str]| run(&[&few[..], more].concat());

    let (code, screen) = with(&[]);
    assert_eq!(code, Some(1));
    assert!(screen.contains("casts: 2 tensors are the other side rounded"), "{screen}");
    assert!(screen.contains("--allow-cast lets them pass"), "{screen}");
    let (code, screen) = with(&["--allow-cast"]);
    assert_eq!(code, Some(0), "{screen}");
    assert!(screen.contains("equal after cast: 2 of 2 tensors are casts"), "{screen}");
    // Infinity and NaN have no distance, unless they are at the same place.
    assert_eq!(with(&["--max", "rel_l2=0.1"]).0, Some(1));
    let (code, screen) = with(&["--max", "max_ulp=0", "--equal-nan"]);
    assert_eq!(code, Some(1), "{screen}");
    let (code, screen) = with(&["--rtol", "1"]);
    assert!(
        screen.contains(
            "weak tolerance: 2 tensors, the first is float16.float32: zeros would hold rtol 1"
        ),
        "{screen}"
    );
    assert_eq!(code, Some(1), "{screen}");

    let ignored = rules(
        "[[rule]]\nmatch = 'float32.*'\nallow-cast = true\n[[rule]]\nmatch = '*'\nignore = true\n",
    );
    let (code, screen) = run(&["--rules", &ignored]);
    assert_eq!(code, Some(0), "{screen}");
    assert!(screen.contains("ignored by rules: 49 names"), "{screen}");
    let required = rules("[[rule]]\nmatch = 'gone.*'\nrequired = true\n");
    let (code, screen) = with(&["--allow-cast", "--rules", &required]);
    assert_eq!(code, Some(2), "{screen}");
    assert!(
        screen.contains("the rule on line 1 requires a tensor, and none is compared: gone.*"),
        "{screen}"
    );
    let (code, screen) = with(&["--rules", &rules("[[rule]]\nmatch = 'a'\nrtoll = 1\n")]);
    assert_eq!(code, Some(2));
    assert!(screen.contains("rules.toml: line 3, column 1: unknown field `rtoll`"), "{screen}");
    for bad in [["--max", "cos=1"], ["--rtol", "-1"], ["--tolerance", "numpy"]] {
        assert_eq!(with(&bad).0, Some(2), "{bad:?}");
    }
}

#[test]
fn a_name_on_one_side_passes_only_where_a_rule_says_so() {
    let [wide, narrow] = ["wide.safetensors", "narrow.safetensors"].map(fixture);
    let (bytes, mut header, data) = tensors(&narrow);
    assert!(header.as_object_mut().unwrap().remove("float16.bfloat16").is_some());
    // The bytes of the tensor that is gone belong to one of another name.
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("b.safetensors");
    let all: serde_json::Value = tensors(&narrow).1;
    header["float16.other"] = all["float16.bfloat16"].clone();
    let text = serde_json::to_vec(&header).unwrap();
    let file = [&(text.len() as u64).to_le_bytes()[..], &text, &bytes[data..]].concat();
    std::fs::write(&path, file).unwrap();
    let with = |text: &str| {
        judged(
            &wide,
            &path,
            Policy { rules: text.parse::<Rules>().unwrap().rules, ..allowing_casts() },
        )
    };
    let code = |text: &str| with(text).verdict.exit_code();
    assert_eq!(code(""), 1);
    assert_eq!(code("[[rule]]\nmatch = 'float16.*'\nallow-missing = 'b'\n"), 1);
    assert_eq!(code("[[rule]]\nmatch = 'float16.*'\nallow-missing = 'both'\n"), 0);
    let report = with("[[rule]]\nmatch = 'float16.*'\nallow-missing = 'both'\n");
    assert_eq!(report.excused.only_in.each_ref().map(Vec::len), [1, 1]);
    // The first rule that matches decides.
    assert_eq!(
        code("[[rule]]\nmatch = 'float16.b*'\n[[rule]]\nmatch = '*'\nallow-missing = 'both'\n"),
        1
    );
}

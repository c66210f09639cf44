//! Promise: who reads the document of `--report` and nothing else never takes a failing run for a passing one.

#![cfg(unix)]

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::LazyLock;

use crate::common::damage::{pick, random};
use crate::common::{Copied, Run, ckptcmp, fixture, flip, layout, read_json, rename_key};
use ckptcmp::base::side::Side;
use ckptcmp::compare::{Outcome, ReadError};
use ckptcmp::judge::bounds::Bounds;
use ckptcmp::judge::verdict;
use ckptcmp::{CompareOptions, OpenOptions};
use clap::Parser;
use serde_json::{Value, json};
use tempfile::TempDir;

static SCHEMA: LazyLock<jsonschema::Validator> = LazyLock::new(|| {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("schema/compare-report.schema.json");
    let schema = read_json(&path);
    jsonschema::meta::validate(&schema).expect("the schema is one");
    jsonschema::validator_for(&schema).expect("the schema is one")
});

/// It holds the schema, and whatever says the verdict says the same.
#[track_caller]
fn assert_valid(document: &Value, code: i32, place: &str) {
    let errors: Vec<String> = SCHEMA
        .iter_errors(document)
        .map(|error| format!("{}: {error}", error.instance_path()))
        .collect();
    assert!(errors.is_empty(), "{place}: {errors:#?}");
    assert_verdict(document, code, place);
}

#[track_caller]
fn assert_verdict(document: &Value, code: i32, place: &str) {
    assert_eq!(document["exit_code"], code, "{place}: {}", document["errors"]);
    assert_eq!(document["passes"], code == 0, "{place}");
    assert_eq!(document["verdict"], rederived(document), "{place}");
}

/// The verdict by the tensors and names of a document, and by nothing else that says it.
fn rederived(document: &Value) -> &'static str {
    const WORDS: [&str; 6] = ["identical", "equal", "cast", "within", "different", "trouble"];
    let list = |value: &Value| value.as_array().cloned().unwrap_or_default();
    let tensors = list(&document["tensors"]);
    let of_tensor = |tensor: &Value| match (tensor["verdict"].as_str(), &tensor["passes"]) {
        (Some("unread"), _) => 5,
        (_, Value::Bool(false)) => 4,
        (word, _) => WORDS.iter().position(|one| Some(*one) == word).unwrap(),
    };
    let sides = ["a", "b"];
    let has_problems = sides.iter().any(|side| {
        let problems = &document["sides"][side]["problems"];
        problems.is_null() || problems.as_array().is_some_and(|problems| !problems.is_empty())
    });
    let is_unmet = list(&document["unused_rules"]).iter().any(|rule| rule["required"] == true);
    let Some(worst) = tensors.iter().map(of_tensor).max().filter(|_| !has_problems && !is_unmet)
    else {
        return "trouble";
    };
    let is_unpaired = sides.iter().any(|side| !list(&document["only_in"][side]).is_empty());
    let copies = tensors.iter().flat_map(|tensor| list(&tensor["replicas"]));
    let has_diverged = copies.into_iter().any(|copy| copy["disagrees"] == true)
        && document["options"]["allow_diverged"] == false;
    WORDS[if is_unpaired || has_diverged { worst.max(4) } else { worst }]
}

/// `compare` with the document on standard output, and no result.
fn compare(folder: &TempDir, a: &Path, b: &Path, flags: &[&str]) -> Run {
    let output = folder.path().join("result.json");
    let mut command = ckptcmp();
    command.arg("compare").args([a, b]).args(["--force", "--quiet", "--report", "-", "-o"]);
    Run::of(command.arg(output).args(flags))
}

#[test]
fn documents_of_every_outcome_hold_the_schema() {
    let folder = TempDir::new().unwrap();
    let rules = folder.path().join("rules.toml");
    let text = "[[rule]]\nmatch = ['*fc1*', 'x']\nrtol = 0.5\natol = 1e9\nmax = { l2 = 1e9 }\n\
        [[rule]]\nmatch = '*.bias'\nignore = true\n[[rule]]\nmatch = 'nobody'\nallow-missing = 'both'\n";
    fs::write(&rules, text).unwrap();
    let required = folder.path().join("required.toml");
    fs::write(&required, "[[rule]]\nmatch = 'nobody'\nrequired = true\n").unwrap();
    let [rules, required] = [&rules, &required].map(|path| path.to_str().unwrap());
    let small = layout("gpt-small/tp1");
    let changed = Copied::of(&small);
    flip(&changed.path(), "decoder.final_layernorm.weight", &[3]);
    let renamed = Copied::of(&small);
    for layer in 0..2 {
        let named = |norm: &str| format!("decoder.layers.{layer}.{norm}.weight");
        rename_key(&renamed.path(), &named("pre_mlp_layernorm"), &named("pre_mlp_mystery77"));
    }
    let (changed, renamed) = (changed.path(), renamed.path());
    let [wide, narrow] =
        ["wide", "narrow"].map(|name| fixture(&format!("judging/{name}.safetensors")));
    let faults = |name: &str| layout(&format!("faults/{name}"));
    let padded = [layout("gpt/tp1"), layout("gpt/tp2")];
    let pairs: &[(&Path, &Path, &[&str], &str)] = &[
        (&small, &layout("gpt-small/tp2"), &[], "identical"),
        (&small, &fixture("torch_dist/gpt-small/tp2pp2"), &[], "identical"),
        (&padded[0], &padded[1], &["--vocab-size", "90"], "identical"),
        (&small, &changed, &[], "different"),
        (&small, &changed, &["--exit-zero"], "different"),
        (&small, &changed, &["--rtol", "0.1", "--atol", "1e9"], "within"),
        (&small, &changed, &["--rtol", "2"], "within"),
        (&small, &changed, &["--max", "l2=1e-30", "--max", "max_ulp=0"], "different"),
        (&small, &changed, &["--rules", rules], "different"),
        (
            &small,
            &changed,
            &["--exclude", "*final*", "--include", "*", "--include", "nobody"],
            "identical",
        ),
        (&small, &small, &["--rules", required], "trouble"),
        (&small, &small, &["--include", "nobody"], "trouble"),
        (&renamed, &small, &[], "different"),
        (&wide, &narrow, &[], "different"),
        (&wide, &narrow, &["--allow-cast"], "cast"),
        (&wide, &narrow, &["--tolerance", "torch"], "different"),
        (&small, &layout("gpt-small/tp2/iter_0000005/mp_rank_00"), &[], "different"),
        (&faults("nan-tp1"), &small, &[], "different"),
        (&faults("nan-tp1"), &faults("nan-tp1"), &["--equal-nan"], "identical"),
        (&faults("diverged-replica-tp2"), &small, &[], "different"),
        (&faults("diverged-replica-tp2"), &small, &["--allow-diverged"], "identical"),
        (&faults("sparse-tp1"), &small, &[], "trouble"),
        (&faults("missing-key-tp2"), &small, &[], "trouble"),
        (&faults("truncated"), &faults("no-tensors"), &[], "trouble"),
        (&small, Path::new("/no/such/checkpoint"), &[], "trouble"),
        (&small, &small, &["--rules", "/no/such/rules"], "trouble"),
        (&small, &small, &["--metrics", "nonsense"], "trouble"),
    ];
    let mut seen = Vec::new();
    for (a, b, flags, verdict) in pairs {
        let place = format!("{} {} {flags:?}", a.display(), b.display());
        let run = compare(&folder, a, b, flags);
        let document = run.json();
        let code = if flags.contains(&"--exit-zero") { 1 } else { run.code };
        assert_valid(&document, code, &place);
        assert_eq!(document["verdict"], *verdict, "{place}: {}", run.stderr);
        let lines = run.stderr.lines().map(|line| line.strip_prefix("ckptcmp: ").unwrap());
        assert_eq!(document["errors"], json!(lines.collect::<Vec<_>>()), "{place}");
        for tensor in document["tensors"].as_array().into_iter().flatten() {
            seen.push(tensor["verdict"].as_str().unwrap().to_owned());
        }
    }
    for verdict in ["identical", "cast", "within", "different"] {
        assert!(seen.iter().any(|one| one == verdict), "no tensor is {verdict}");
    }
}

/// Runs the command in this process; returns its exit code and its document.
fn in_process(folder: &TempDir, a: &Path, b: &Path, flags: &[&str]) -> (i32, Value) {
    let report = folder.path().join("report.json");
    let paths = [a, b, Path::new("-o"), Path::new("/dev/null"), Path::new("--report"), &report];
    let args = ["ckptcmp", "compare", "--force", "--quiet", "--threads", "1"].map(Path::new);
    let args = args.into_iter().chain(paths).chain(flags.iter().map(Path::new));
    let cli = ckptcmp::cli::Cli::try_parse_from(args).unwrap();
    let code = ckptcmp::run::run(&cli).map_or(2, i32::from);
    (code, read_json(&report))
}

#[test]
fn five_hundred_changed_values_never_part_verdict_and_exit_code() {
    let flags: [&[&str]; 5] = [
        &["--allow-cast"],
        &["--allow-cast", "--rtol", "1e-2", "--atol", "1e-2"],
        &["--max", "rel_l2=0.5", "--equal-nan"],
        &["--allow-cast", "--tolerance", "torch", "--max", "max_abs=0.1"],
        &[],
    ];
    let [wide, narrow] =
        ["wide", "narrow"].map(|name| fixture(&format!("judging/{name}.safetensors")));
    let pairs = [[&wide, &narrow], [&narrow, &narrow]];
    let folder = TempDir::new().unwrap();
    let changed = folder.path().join("changed.safetensors");
    let mut seen = std::collections::BTreeMap::<String, usize>::new();
    for number in 0..500 {
        let [a, b] = pairs[number % 2];
        let mut bytes = fs::read(a).unwrap();
        // One in ten anywhere in the file, names and shapes too; the others among the elements.
        let header = 8 + usize::from(bytes[0]) + 256 * usize::from(bytes[1]);
        let start = if number % 10 == 0 { 0 } else { header };
        let at = start + pick(2 * number, bytes.len() - start);
        bytes[at] ^= 1 + random(2 * number as u64 + 1).to_le_bytes()[0] % 255;
        fs::write(&changed, bytes).unwrap();
        let sides: [&PathBuf; 2] = if number % 4 < 2 { [&changed, b] } else { [b, &changed] };
        let (code, document) = in_process(&folder, sides[0], sides[1], flags[number % 5]);
        let place = format!("change {number} at byte {at}");
        match number % 10 {
            0 => assert_valid(&document, code, &place),
            _ => assert_verdict(&document, code, &place),
        }
        *seen.entry(document["verdict"].as_str().unwrap().to_owned()).or_default() += 1;
    }
    for verdict in ["cast", "within", "different", "trouble"] {
        assert!(seen.contains_key(verdict), "no comparison is {verdict}: {seen:?}");
    }
}

#[test]
fn the_document_is_the_same_for_any_number_of_threads_and_has_what_the_screen_has() {
    let folder = TempDir::new().unwrap();
    let changed = Copied::of(&layout("gpt-small/tp2"));
    flip(&changed.path(), "decoder.final_layernorm.weight", &[3]);
    let small = layout("gpt-small/tp1");
    let run = |flags: &[&str]| compare(&folder, &small, &changed.path(), flags);
    let one = run(&["--threads", "1"]);
    assert_eq!(one.stdout, run(&["--threads", "7"]).stdout);
    let document = one.json();
    assert_eq!(document["summary"], "different: 1 of 15 tensors differ");
    let totals = &document["totals"];
    let wanted =
        json!({"identical": 14, "equal": 0, "cast": 0, "within": 0, "different": 1, "unread": 0});
    assert_eq!(totals["verdicts"], wanted);
    assert_eq!((&totals["elements"], &totals["replicas_that_disagree"]), (&json!(1896), &json!(0)));
    assert_eq!(document["sections"]["not_compared"], json!(["optimizer", "state"]));
    let tensors = document["tensors"].as_array().unwrap();
    let changed = tensors.iter().find(|tensor| tensor["passes"] == false).unwrap();
    assert_eq!(changed["worst"]["index"], json!([3]));
    assert!(changed["metrics"]["max_ulp"].as_u64() > Some(0), "{changed}");
}

#[test]
fn a_tensor_that_could_not_be_read_is_one_of_the_document() {
    let open = || ckptcmp::open(layout("gpt-small/tp1"), &OpenOptions::default()).unwrap();
    let mut report = ckptcmp::compare(open(), open(), &CompareOptions::default()).unwrap();
    let lost = &mut report.tensors[3];
    let message = "Input/output error (os error 5)".to_owned();
    let error = ReadError { side: Side::B, file: PathBuf::from("shard.pt"), message };
    lost.tensor.outcome = Outcome::Unreadable(error);
    lost.judgement = verdict::of_tensor(&lost.tensor, &Bounds::default());
    let judgements = report.tensors.iter().map(|judged| &judged.judgement);
    report.verdict = verdict::of_all(judgements, 0, 0, false);
    let mut json = Vec::new();
    report.write_document(false, &mut json).unwrap();
    let document: Value = serde_json::from_slice(&json).unwrap();
    assert_valid(&document, 2, "an unread tensor");
    let tensor = &document["tensors"][3];
    assert_eq!((&tensor["verdict"], &tensor["error"]["side"]), (&json!("unread"), &json!("b")));
    assert!(tensor["metrics"]["l2"].is_null());
    assert_eq!(document["totals"]["verdicts"]["unread"], 1);
}

#[test]
fn a_failing_run_leaves_no_document_of_a_passing_one() {
    let folder = TempDir::new().unwrap();
    let report = folder.path().join("report.json");
    let (small, gone) = (layout("gpt-small/tp1"), PathBuf::from("/no/such/checkpoint"));
    let run = |b: &Path, flags: &[&str]| {
        let mut command = ckptcmp();
        command
            .arg("compare")
            .arg(&small)
            .arg(b)
            .args(["-o", "/dev/null", "--report"])
            .arg(&report);
        Run::of(command.args(flags))
    };
    let verdict = || read_json(&report)["verdict"].clone();
    assert_eq!((run(&small, &[]).code, verdict()), (0, json!("identical")));
    run(&gone, &[]).refuses(&["report.json: the file exists", "--report"]);
    assert_eq!(verdict(), "identical", "it is not ours to touch");
    run(&gone, &["--force"]).refuses(&["/no/such/checkpoint"]);
    assert_eq!(verdict(), "trouble");
    assert_eq!(run(&small, &["--force"]).code, 0);
    run(&small, &["--force", "--metrics", "nonsense"]).refuses(&["nonsense"]);
    assert_eq!(verdict(), "trouble");
    assert_eq!(run(&small, &["--force"]).code, 0);
    run(&small, &["--force", "--report", "/no/such/folder/report.json"])
        .refuses(&["/no/such/folder"]);
    assert!(!report.exists(), "what could not be written anew is gone");
    fs::write(&report, "something else").unwrap();
    run(&gone, &["--force"]).refuses(&["/no/such/checkpoint"]);
    assert_eq!(fs::read(&report).unwrap(), b"something else");
}

#[cfg(target_os = "linux")]
#[test]
fn a_screen_that_cannot_be_written_makes_the_document_one_of_trouble() {
    let folder = TempDir::new().unwrap();
    let report = folder.path().join("report.json");
    let full = fs::File::options().write(true).open("/dev/full").unwrap();
    let small = layout("gpt-small/tp1");
    let mut command = ckptcmp();
    command
        .arg("compare")
        .args([&small, &small])
        .args(["-o", "/dev/null", "--report"])
        .arg(&report);
    let status = command.stdout(full).stderr(std::process::Stdio::null()).status().unwrap();
    assert_eq!(status.code(), Some(2));
    assert_valid(&read_json(&report), 2, "a full disk");
}

#[test]
fn a_document_has_a_place_and_a_form_of_its_own() {
    let folder = TempDir::new().unwrap();
    let small = Copied::of(&layout("gpt-small/tp1"));
    let run = |flags: &[&str]| {
        let mut command = ckptcmp();
        command.current_dir(folder.path()).arg("compare").args([small.path(), small.path()]);
        Run::of(command.args(flags))
    };
    let unknown = run(&["--report", "report.xyz"]);
    assert_eq!(unknown.code, 2);
    assert!(unknown.stderr.contains("no report has this suffix: there are .json"), "{unknown:?}");
    run(&["-o", "-", "--report", "-"]).refuses(&["a place of their own"]);
    run(&["-o", "x.json", "--report", "./x.json"]).refuses(&["a place of their own"]);
    run(&["--report", "x.json", "--report", "x.json"]).refuses(&["a place of their own"]);
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
    let shard = small.iteration().join("mp_rank_00/model_optim_rng.pt");
    let before = fs::read(&shard).unwrap();
    let named = shard.with_extension("json");
    fs::rename(&shard, &named).unwrap();
    std::os::unix::fs::symlink(&named, &shard).unwrap();
    run(&["--report", named.to_str().unwrap(), "--force"]).refuses(&["a file of a"]);
    assert_eq!(fs::read(&named).unwrap(), before);
    let two = run(&["--report", "x.json", "--report", "y.JSON"]);
    assert_eq!(two.code, 0);
    for wrote in ["wrote ckpt_similarity.json\n", "wrote x.json\n", "wrote y.JSON\n"] {
        assert!(two.stdout.contains(wrote), "{}", two.stdout);
    }
    assert_eq!(two.stdout.lines().last(), Some("identical: all 15 tensors bit for bit"));
    let read = |name: &str| fs::read(folder.path().join(name)).unwrap();
    assert_eq!(read("x.json"), read("y.JSON"));
}

/// Every module of a document with its layer.
fn modules(document: &Value) -> Vec<(&Value, &Value)> {
    let layers = document["layers"].as_array().unwrap();
    layers
        .iter()
        .flat_map(|layer| layer["modules"].as_array().unwrap().iter().map(move |one| (layer, one)))
        .collect()
}

#[test]
fn the_layers_of_a_document_say_what_its_tensors_say() {
    let folder = TempDir::new().unwrap();
    let llama = |name: &str| fixture(&format!("megatron/llama-bf16/{name}"));
    let moe = |name: &str| layout(&format!("moe/{name}"));
    let pairs = [
        (llama("A/tp1pp2-first3-torch"), llama("B/tp1pp1-torch")),
        (moe("seq-tp4ep1etp2"), moe("legacy-switch-ep2")),
        (layout("faults/nan-tp1"), layout("gpt-small/tp1")),
    ];
    for (a, b) in pairs {
        let document = compare(&folder, &a, &b, &["--section", "model,optimizer"]).json();
        let tensors = document["tensors"].as_array().unwrap();
        let mut seen = vec![0; tensors.len()];
        let mut first = Value::Null;
        for (layer, module) in modules(&document) {
            let members = module["tensors"].as_array().unwrap();
            let members: Vec<&Value> = members
                .iter()
                .map(|index| {
                    let index = usize::try_from(index.as_u64().unwrap()).unwrap();
                    seen[index] += 1;
                    &tensors[index]
                })
                .collect();
            let worst = members.iter().filter_map(|one| one["metrics"]["rel_l2"].as_f64());
            assert_eq!(module["worst_rel_l2"].as_f64(), worst.reduce(f64::max), "{module}");
            let passes = members.iter().all(|one| one["passes"] == true);
            assert_eq!(module["passes"], passes, "{module}");
            if first.is_null()
                && let Some(tensor) = members.iter().find(|one| one["passes"] == false)
            {
                first = json!({
                    "state": layer["state"], "layer": layer["title"], "module": module["name"],
                    "tensor": tensor["name"],
                });
            }
        }
        assert!(seen.iter().all(|times| *times == 1), "each tensor is in one module: {seen:?}");
        assert_eq!(document["first_difference"], first);
        let squares = |metric: &str| {
            let values = tensors.iter().filter(|one| !one["metrics"]["l2"].is_null());
            let values = values.filter_map(|one| one["metrics"][metric].as_f64());
            values.map(|value| value * value).sum::<f64>()
        };
        let expected = (squares("l2") / squares("norm_b")).sqrt();
        let found = document["overall"]["rel_l2"].as_f64().unwrap();
        assert!((found - expected).abs() <= 1e-12 * expected, "{found} {expected}");
    }
}

//! Promise: whatever is in a file, the command ends soon, in bounded memory, with an exit code of its own and a reason;
//! nothing in a file reaches the terminal unescaped.

#![cfg(unix)]

mod arguments;
mod budgets;
mod damage;
mod folders;
mod pickles;
mod sizes;
mod terminal;

use crate::common::crafted::{Checkpoint, P, all_commands, dict, namespace, tensor};

/// A model that is as it should be, but for what is added to it.
fn model_with<'a>(more: impl IntoIterator<Item = (&'a str, P)>) -> P {
    let whole = [("decoder.layers.0.input_layernorm.weight", tensor(&[8]))];
    dict(whole.into_iter().chain(more))
}

fn plain_args() -> P {
    namespace([("num_layers", P::Int(1)), ("tensor_model_parallel_size", P::Int(1))])
}

#[test]
fn what_the_helpers_write_is_a_checkpoint() {
    let good = Checkpoint::with(model_with([]), plain_args());
    let run = all_commands("a good one", &good);
    assert_eq!((run.code, run.stderr.as_str()), (0, ""));
    assert!(run.stdout.contains("compared 1 tensor, 8 elements"), "{}", run.stdout);
}

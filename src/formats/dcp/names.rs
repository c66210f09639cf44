//! The meaning of the keys of a saved state dict.
//!
//! torch 2.3 to 2.15: `torch/distributed/checkpoint/state_dict.py` (`get_state_dict`), `_nested_dict.py`, `stateful.py`.

use std::collections::BTreeSet;
use std::sync::Arc;

use crate::formats::wrappers::without_wrappers;
use crate::names::megatron::is_buffer;

/// The meaning of a key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum KeyMeaning {
    /// A weight of this name.
    Model(String),
    /// `optimizer.<state>.<weight>`.
    Optimizer(String),
    /// No weight, but an entry of the run's state.
    State(String),
    /// A value that training recomputes or keeps for itself.
    Buffer,
}

/// Names of the dict with the optimizer's state, the second one in torch's own examples.
const OPTIMIZERS: [&str; 2] = ["optimizer.", "optim."];

/// Top-level entries beside `model` and the optimizer that hold tensors and no weights.
const OF_RUN: [&str; 10] = [
    "rng",
    "rng_state",
    "rng_states",
    "random_states",
    "cuda_rng_state",
    "dataloader",
    "train_dataloader",
    "train_state",
    "scheduler",
    "lr_scheduler",
];

/// The form of the keys of one checkpoint.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct KeyForm {
    /// In front of all that one `Stateful` object saved, such as `app.`.
    object: String,
    /// The weights are all that is in a dict of their own.
    has_model_dict: bool,
    /// The state dict is that of an optimizer alone.
    is_bare_optimizer: bool,
}

impl KeyForm {
    /// Reads what the keys of all tensors and the outer dicts of the state dict, where they are known, tell.
    pub(super) fn of<'a>(
        tensors: impl Iterator<Item = &'a str> + Clone,
        objects: impl Iterator<Item = &'a str> + Clone,
        parents: Option<&BTreeSet<Arc<str>>>,
    ) -> Self {
        let mut keys = tensors.clone().chain(objects.clone());
        let object = match parents {
            Some(parents) if parents.contains("model") => None,
            Some(parents) => parents.iter().find_map(|parent| parent.strip_suffix(".model")),
            None => keys.clone().any(|key| key.starts_with("app.model.")).then_some("app"),
        };
        let object = object.map_or_else(String::new, |object| format!("{object}."));
        let is_bare_optimizer = keys.any(|key| key.starts_with("param_groups."))
            && tensors.clone().all(|key| key.starts_with("state."));
        let has_model_dict = match parents {
            Some(parents) => parents.contains(&*format!("{object}model")),
            None => {
                let is_weight = |key: &&str| optimizer(key).is_none() && !is_of_run(key);
                let own = |key: &'a str| key.strip_prefix(&object).unwrap_or(key);
                let mut weights = tensors.map(own).filter(is_weight).peekable();
                let is_dict = || objects.map(own).any(|key| key == "model");
                match weights.peek() {
                    Some(_) => weights.all(|key| key.starts_with("model.")),
                    // A dict that was saved as one object.
                    None => is_dict(),
                }
            }
        };
        Self { object, has_model_dict, is_bare_optimizer }
    }

    /// The meaning of a key.
    pub(super) fn read(&self, key: &str) -> KeyMeaning {
        let own = key.strip_prefix(&*self.object).unwrap_or(key);
        if let Some(of_optimizer) = optimizer(own) {
            return of_state(of_optimizer);
        }
        if self.is_bare_optimizer {
            return of_state(own);
        }
        let weight = match own.strip_prefix("model.").filter(|_| self.has_model_dict) {
            Some(weight) => weight,
            None if self.has_model_dict && is_of_run(own) => {
                return KeyMeaning::State(own.to_owned());
            }
            None => own,
        };
        let weight = without_wrappers(weight);
        if is_buffer(&weight) { KeyMeaning::Buffer } else { KeyMeaning::Model(weight) }
    }

    /// The weight that an entry of the optimizer is about: `state.<weight>.<state>`, `param_groups.<weight>.<option>`.
    pub(super) fn weight_of(&self, key: &str) -> Option<String> {
        let own = key.strip_prefix(&*self.object).unwrap_or(key);
        let own = optimizer(own).or(self.is_bare_optimizer.then_some(own))?;
        let fronts = ["state.", "param_groups."];
        let (weight, _) =
            fronts.iter().find_map(|front| own.strip_prefix(front))?.rsplit_once('.')?;
        let is_number = weight.bytes().all(|byte| byte.is_ascii_digit());
        (!is_number).then(|| without_wrappers(weight))
    }

    /// The name of an object that is no tensor: the key without what is in front of all.
    pub(super) fn of_object<'a>(&self, key: &'a str) -> &'a str {
        key.strip_prefix(&*self.object).unwrap_or(key)
    }

    /// Tells whether a key belongs to the optimizer.
    pub(super) fn is_of_optimizer(&self, key: &str) -> bool {
        self.is_bare_optimizer || optimizer(self.of_object(key)).is_some()
    }

    /// Tells whether weights lie in a dict of their own, so that a lone number beside it is none.
    pub(super) fn is_beside_model(&self, key: &str) -> bool {
        self.has_model_dict && !self.of_object(key).starts_with("model.")
    }
}

/// The key without the name of the optimizer.
fn optimizer(key: &str) -> Option<&str> {
    OPTIMIZERS.iter().find_map(|prefix| key.strip_prefix(prefix))
}

/// `state.<weight>.<state>`, or something of the optimizer's own.
fn of_state(key: &str) -> KeyMeaning {
    match key.strip_prefix("state.").and_then(|rest| rest.rsplit_once('.')) {
        Some((weight, state)) => {
            KeyMeaning::Optimizer(format!("optimizer.{state}.{}", without_wrappers(weight)))
        }
        None if key.starts_with("param_groups.") => KeyMeaning::State(format!("optimizer.{key}")),
        None => KeyMeaning::Optimizer(format!("optimizer.{key}")),
    }
}

fn is_of_run(key: &str) -> bool {
    key.split('.').next().is_some_and(|first| OF_RUN.contains(&first))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(tensors: &[&str], objects: &[&str], parents: Option<&[&str]>) -> KeyForm {
        let parents = parents.map(|parents| parents.iter().map(|name| (*name).into()).collect());
        KeyForm::of(tensors.iter().copied(), objects.iter().copied(), parents.as_ref())
    }

    fn model(name: &str) -> KeyMeaning {
        KeyMeaning::Model(name.to_owned())
    }

    fn of_optimizer(name: &str) -> KeyMeaning {
        KeyMeaning::Optimizer(name.to_owned())
    }

    #[test]
    fn a_dict_of_weights_is_left_out_of_their_names() {
        let nested =
            names(&["model.a.weight"], &[], Some(&["model", "optimizer", "optimizer.state"]));
        assert_eq!(nested.read("model.a.weight"), model("a.weight"));
        assert_eq!(
            nested.read("optimizer.state.a.weight.exp_avg"),
            of_optimizer("optimizer.exp_avg.a.weight")
        );
        // A module that is called `model` is not a dict of weights.
        let flat = names(&["model.a.weight"], &[], Some(&[]));
        assert_eq!(flat.read("model.a.weight"), model("model.a.weight"));
        assert_eq!(
            flat.read("optimizer.state.a.weight.step"),
            of_optimizer("optimizer.step.a.weight")
        );
    }

    #[test]
    fn without_planner_data_all_weights_must_have_the_prefix() {
        let all = names(&["model.a", "model.b", "optimizer.state.a.step"], &[], None);
        assert_eq!(all.read("model.a"), model("a"));
        let some = names(&["model.a", "lm_head.weight"], &[], None);
        assert_eq!(some.read("model.a"), model("model.a"));
        assert_eq!(names(&[], &[], None).read("model.a"), model("model.a"));
    }

    #[test]
    fn a_stateful_object_in_front_of_all_is_left_out() {
        let parents = ["app", "app.model", "app.optim"];
        for parents in [Some(&parents[..]), None] {
            let names = names(
                &["app.model.a", "app.optim.state.a.exp_avg"],
                &["app.optim.param_groups.0.lr"],
                parents,
            );
            assert_eq!(names.read("app.model.a"), model("a"));
            assert_eq!(
                names.read("app.optim.state.a.exp_avg"),
                of_optimizer("optimizer.exp_avg.a")
            );
            assert!(names.is_of_optimizer("app.optim.param_groups.0.lr"));
        }
    }

    #[test]
    fn an_optimizer_on_its_own_is_known_by_its_groups() {
        let names = names(&["state.a.b.exp_avg"], &["param_groups.0.lr"], Some(&["state"]));
        assert_eq!(names.read("state.a.b.exp_avg"), of_optimizer("optimizer.exp_avg.a.b"));
    }

    #[test]
    fn what_is_beside_the_model_is_told_from_weights() {
        let names = names(&["model.a"], &[], Some(&["model"]));
        assert_eq!(names.read("rng_state.cpu"), KeyMeaning::State("rng_state.cpu".to_owned()));
        assert_eq!(names.read("ema.a"), model("ema.a"));
        assert_eq!(names.read("model.a._extra_state"), KeyMeaning::Buffer);
        assert!(names.is_beside_model("iteration"));
    }
}

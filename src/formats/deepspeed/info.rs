//! `universal_checkpoint_info`: regular expressions by which a run says itself how its parameters are cut.
//!
//! Facts from DeepSpeed 0.19 (`checkpoint/constants.py`, `checkpoint/ds_to_universal.py`, `merge_tp_slices`).

use std::collections::HashMap;

use regex::bytes::{Regex, RegexBuilder};

use crate::base::limits::{LIMITS, OverLimit};
use crate::base::plain::PlainValue;
use crate::layout::rules::Sharding;

/// The lists of patterns, and the rule of each. Everything else is cut along dimension 0.
const LISTS: [(&str, Sharding); 5] = [
    ("tp_replicated_parameter_patterns", Sharding::Replicated),
    ("parameter_to_average_patterns", Sharding::Averaged),
    ("parameter_with_2_sub_params_cat_dim_0", Sharding::Halves),
    ("vocabulary_parameter_patterns", Sharding::Vocab),
    ("parameter_with_row_parallelism_patterns", Sharding::Split(1)),
];

/// The patterns of one run.
#[derive(Debug, Default)]
pub(super) struct Info {
    rules: Vec<Rule>,
    /// The number of the rule for each parameter that was asked for, as many ranks ask for the same ones.
    known: HashMap<String, Option<usize>>,
    /// Steps that matching may still take, and how many they were.
    steps: u64,
    limit: u64,
    /// Patterns that are no regular expressions that can be read here.
    pub unread: Vec<String>,
}

#[derive(Debug)]
struct Rule {
    regex: Regex,
    /// Characters of the pattern: at most so many steps for each of a name, but for what it repeats.
    len: u64,
    sharding: Sharding,
}

impl Info {
    /// The patterns of a run whose files have so many bytes.
    pub(super) fn new(info: Option<&PlainValue>, bytes: u64) -> Self {
        let limit = bytes.saturating_mul(LIMITS.pattern_steps_a_byte);
        let limit = limit.saturating_add(LIMITS.pattern_steps);
        let mut found = Self { steps: limit, limit, ..Self::default() };
        let Some(PlainValue::Map(info)) = info else { return found };
        for (list, sharding) in LISTS {
            if let Some(PlainValue::List(patterns)) = info.get(list) {
                patterns.iter().for_each(|pattern| found.add(pattern, &sharding));
            }
        }
        if let Some(PlainValue::List(subs)) = info.get("parameter_with_sub_params") {
            subs.iter().for_each(|sub| found.add_sections(sub));
        }
        found
    }

    fn add(&mut self, pattern: &PlainValue, sharding: &Sharding) {
        let PlainValue::Text(pattern) = pattern else { return };
        if self.rules.len() >= LIMITS.patterns {
            return;
        }
        // Python's `re.match` starts at the beginning and need not reach the end.
        let anchored = format!("^(?:{pattern})");
        match RegexBuilder::new(&anchored).unicode(false).size_limit(LIMITS.pattern_bytes).build() {
            Ok(regex) => {
                let (len, sharding) = (pattern.len() as u64, sharding.clone());
                self.rules.push(Rule { regex, len, sharding });
            }
            Err(_) => self.unread.push(pattern.chars().take(LIMITS.quoted).collect()),
        }
    }

    /// `{"patterns": [...], "shape": [[q, k, v], -1], "partition_dim": 0}`.
    fn add_sections(&mut self, sub: &PlainValue) {
        let PlainValue::Map(sub) = sub else { return };
        let (
            Some(PlainValue::List(patterns)),
            Some(PlainValue::List(shape)),
            Some(PlainValue::Int(dim)),
        ) = (sub.get("patterns"), sub.get("shape"), sub.get("partition_dim"))
        else {
            return;
        };
        let dim = usize::try_from(*dim).unwrap_or(usize::MAX);
        let size = |fact: &PlainValue| match fact {
            PlainValue::Int(size) => u64::try_from(*size).ok(),
            _ => None,
        };
        let sizes = match shape.get(dim) {
            Some(PlainValue::List(sizes)) => sizes.iter().map(size).collect::<Option<Vec<u64>>>(),
            _ => None,
        };
        for pattern in patterns {
            match &sizes {
                Some(sizes) => self.add(pattern, &Sharding::Sections { dim, sizes: sizes.clone() }),
                None => self.unread.extend(match pattern {
                    PlainValue::Text(pattern) => {
                        Some(pattern.chars().take(LIMITS.quoted).collect())
                    }
                    _ => None,
                }),
            }
        }
    }

    /// The rule for a parameter, by the name that DeepSpeed's optimizer has for it.
    ///
    /// # Errors
    /// Matching all names against all patterns would take too long.
    pub(super) fn sharding(&mut self, param: &str) -> Result<Option<&Sharding>, OverLimit> {
        let found = match self.known.get(param) {
            Some(known) => *known,
            None => {
                let found = self.find(param)?;
                self.known.insert(param.to_owned(), found);
                found
            }
        };
        Ok(found.and_then(|number| self.rules.get(number)).map(|rule| &rule.sharding))
    }

    fn find(&mut self, param: &str) -> Result<Option<usize>, OverLimit> {
        let over = OverLimit::new("steps to match names", self.limit);
        for (number, rule) in self.rules.iter().enumerate() {
            let steps = rule.len.saturating_mul(param.len() as u64);
            self.steps = self.steps.checked_sub(steps).ok_or(over)?;
            if rule.regex.is_match(param.as_bytes()) {
                return Ok(Some(number));
            }
        }
        Ok(None)
    }
}

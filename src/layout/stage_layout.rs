//! Stages as a run lays them out by hand: `Et*3|(tt|)*29,m|L`, a letter a layer and a bar between stages.
//!
//! Facts from Megatron-LM core_v0.13 to 0.19 (`core/transformer/pipeline_parallel_layer_layout.py`, `PipelineParallelLayerLayout`): stages
//! go by virtual stage first, as [`ModelChunk`](super::ModelChunk)s do; and from d98e8a6 (`core/models/hybrid`) for the bars in a
//! pattern of a hybrid model's layers.

use crate::base::limits::LIMITS;
use crate::base::plain::PlainValue;

use super::{ArgName, RunArgs};

/// A layer of the decoder: the letter in a text, the word in a list.
const DECODER: (char, &str) = ('t', "decoder");

/// Layers of the decoder in each stage, virtual stage by virtual stage; `None` where the run lays out none by hand, or in a form that
/// is not known.
pub(super) fn decoder_layers(args: &RunArgs) -> Option<Vec<u64>> {
    match args.get(ArgName::PIPELINE_MODEL_PARALLEL_LAYOUT) {
        Some(PlainValue::Text(text)) => {
            let letters = unrolled(text)?;
            let count =
                |stage: &[char]| stage.iter().filter(|letter| **letter == DECODER.0).count();
            Some(letters.split(|letter| *letter == '|').map(|stage| count(stage) as u64).collect())
        }
        Some(PlainValue::List(stages)) => stages.iter().map(words).collect(),
        _ => {
            let pattern = args.text(ArgName::HYBRID_LAYER_PATTERN)?.split('/').next()?;
            let stages = pattern.split('|').map(|stage| stage.chars().count() as u64);
            pattern.contains('|').then(|| stages.collect())
        }
    }
}

/// Layers of the decoder in a stage that is a list of words.
fn words(stage: &PlainValue) -> Option<u64> {
    let PlainValue::List(layers) = stage else { return None };
    let is_decoder = |layer: &PlainValue| {
        layer.as_text().map(|word| word.trim().eq_ignore_ascii_case(DECODER.1))
    };
    let decoders: Option<Vec<bool>> = layers.iter().map(is_decoder).collect();
    Some(decoders?.into_iter().filter(|is_decoder| *is_decoder).count() as u64)
}

/// The letters and bars of a text, `x*3` and `(xy|)*29` written out. `None` where they are more than a model has layers.
fn unrolled(text: &str) -> Option<Vec<char>> {
    let most = usize::try_from(LIMITS.layers).ok()?;
    let mut letters: Vec<char> = Vec::new();
    // Beginnings of the groups that are open, and of what a `*` repeats.
    let (mut open, mut unit) = (Vec::new(), 0);
    let mut rest =
        text.chars().filter(|letter| *letter != ',' && !letter.is_whitespace()).peekable();
    while let Some(letter) = rest.next() {
        match letter {
            '(' => open.push(letters.len()),
            ')' => unit = open.pop()?,
            '*' => {
                let mut times = 0_usize;
                while let Some(digit) = rest.peek().and_then(|letter| letter.to_digit(10)) {
                    times = times.checked_mul(10)?.checked_add(digit as usize)?;
                    rest.next();
                }
                let repeated = letters.split_off(unit);
                let length = repeated.len().checked_mul(times)?.checked_add(unit)?;
                if length > most {
                    return None;
                }
                // Nothing is nothing however often.
                letters.extend(repeated.repeat(times.min(length)));
            }
            _ => {
                unit = letters.len();
                letters.push(letter);
            }
        }
    }
    (open.is_empty() && letters.len() <= most).then_some(letters)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layers(name: &str, value: PlainValue) -> Option<Vec<u64>> {
        decoder_layers(&RunArgs::new([(name.to_owned(), value)].into(), &[]))
    }

    fn text(text: &str) -> Option<Vec<u64>> {
        layers("pipeline_model_parallel_layout", PlainValue::Text(text.to_owned()))
    }

    #[test]
    fn letters_are_written_out() {
        assert_eq!(text("Et*3|(tt|)*3,m|L"), Some(vec![3, 2, 2, 2, 0, 0]));
        assert_eq!(text("E|t*2,|tttL"), Some(vec![0, 2, 3]));
        assert_eq!(text("Et|(t*2|)*2tL"), Some(vec![1, 2, 2, 1]));
        assert_eq!(text("E(|t)*2|L"), Some(vec![0, 1, 1, 0]));
        assert_eq!(text("Ett|L"), Some(vec![2, 0]));
        assert_eq!(text("Et)*2"), None);
        assert_eq!(text("(E"), None);
    }

    #[test]
    fn a_list_and_a_pattern_say_the_same() {
        let stage = |words: &[&str]| {
            PlainValue::List(
                words.iter().map(|word| PlainValue::Text((*word).to_owned())).collect(),
            )
        };
        let stages = vec![stage(&["embedding", "decoder"]), stage(&["Decoder", "decoder", "loss"])];
        let list = PlainValue::List(stages);
        assert_eq!(layers("pipeline_model_parallel_layout", list), Some(vec![1, 2]));
        let pattern =
            |text: &str| layers("hybrid_layer_pattern", PlainValue::Text(text.to_owned()));
        assert_eq!(pattern("M*|M-M/MM"), Some(vec![2, 3]));
        assert_eq!(pattern("M*M-M"), None);
    }

    #[test]
    fn bombs_are_refused() {
        for bomb in ["t*99999999999999999999999", "(t*1000|)*9999999", "t*9999*9999*9999"] {
            assert_eq!(text(bomb), None, "{bomb}");
        }
        assert_eq!(text("()*99999999999"), Some(vec![0]));
        assert_eq!(text(&"(".repeat(1 << 20)), None);
    }
}

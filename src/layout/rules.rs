//! THE table: the sharding of every parameter under tensor parallelism.
//!
//! One line a rule: the end of a canonical name -> [`Sharding`]. The longest suffix wins; a name
//! without a rule is an error where there is more than one shard, never "replicated". Formats whose
//! names stay as they are stored bring a table of their own.
//! Sources: Megatron-LM core_v0.4 to core_v0.19 (`core/tensor_parallel/layers.py`,
//! `core/extensions/transformer_engine.py`, each module's `sharded_state_dict`), MindSpeed-LLM
//! (`tasks/models/transformer`).

use std::collections::HashMap;

use thiserror::Error;

use crate::names::pattern::SuffixTable;

/// The way in which the shards of one parameter make the whole.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Sharding {
    /// Every rank holds all of it.
    Replicated,
    /// Every rank holds all of it, and where the copies have drifted apart upstream takes their mean.
    Averaged,
    /// The bias of a row-parallel layer: a copy, or a part of a sum where the outputs are added up after it.
    RowBias,
    /// Ranks hold consecutive parts of this dimension.
    Split(usize),
    /// As `Split(0)`, over vocabulary rows that are padded to a multiple that depends on the layout.
    Vocab,
    /// Each rank holds a part of both halves: `[first; second]`.
    Halves,
    /// The first linear of an MLP: [`Sharding::Halves`] where it is gated, `Split(0)` where it is not.
    Gated,
    /// Query, key and value rows: each rank holds `[q; k; v]` of its own heads.
    QueryKeyValue,
    /// Query, key and value rows: whole heads, or [`Sharding::QueryKeyValue`] where several heads share a key.
    Heads,
    /// Each rank holds its part of every one of these sections of a dimension.
    Sections {
        /// The dimension.
        dim: usize,
        /// Sizes of the whole sections.
        sizes: Vec<u64>,
    },
    /// One of a Mamba-2 mixer's fused tensors: each rank holds its part of every section.
    Mamba(Fused),
    /// One of a gated delta net's tensors, likewise.
    DeltaNet(Fused),
    /// A latent attention's down-projection: split or replicated, as its rows tell.
    Latent(Latent),
}

/// The tensors of a state-space or linear-attention layer that depend on its sections.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fused {
    /// The input projection.
    InProj,
    /// The convolution.
    Conv,
    /// One value a head.
    Heads,
    /// The output projection.
    OutProj,
}

/// The down-projections of latent attention.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Latent {
    /// `q_lora_rank` rows.
    Query,
    /// `kv_lora_rank + qk_pos_emb_head_dim` rows.
    KeyValue,
}

use Sharding::{DeltaNet, Gated, Halves, Mamba, Replicated, Split, Vocab};

#[rustfmt::skip]
static RULES: &[(&str, Sharding)] = &[
    // embeddings and heads
    ("word_embeddings.weight",                              Vocab),
    ("output_layer.{weight,bias}",                          Vocab),
    ("lm_head.bias",                                        Vocab),
    ("{position_embeddings,tokentype_embeddings}.weight",   Replicated),
    ("word_embeddings.norm.{weight,bias}",                  Replicated),
    ("relative_attention_bias.weight",                      Replicated),
    ("lm_head.{dense,layer_norm,layernorm,norm}.{weight,bias}", Replicated),
    ("{binary_head,classification_head,multichoice_head}.{weight,bias}", Replicated),
    ("pooler.dense.{weight,bias}",                          Replicated),
    // norms
    ("{input_layernorm,pre_mlp_layernorm,pre_cross_attn_layernorm,final_layernorm}.{weight,bias}", Replicated),
    ("{post_attn_norm,post_mlp_layernorm,post_self_attn_layernorm}.{weight,bias}", Replicated),
    ("{q_layernorm,k_layernorm,kv_layernorm}.{weight,bias}", Replicated),
    ("norm.{weight,bias}",                                  Replicated),
    // attention
    ("linear_qkv.{weight,bias}",                            Split(0)),
    ("{linear_q,linear_kv}.{weight,bias}",                  Split(0)),
    ("linear_proj.weight",                                  Split(1)),
    ("linear_proj.bias",                                    Replicated),
    ("core_attention.softmax_offset",                       Split(0)),
    ("{linear_q_proj,linear_q_up_proj,linear_kv_up_proj}.{weight,bias}", Split(0)),
    ("linear_q_down_proj.weight",                           Sharding::Latent(Latent::Query)),
    ("linear_kv_down_proj.weight",                          Sharding::Latent(Latent::KeyValue)),
    ("indexer.{linear_wq_b,linear_wk,linear_weights_proj,k_norm}.{weight,bias}", Replicated),
    ("dsa_indexer.{wq_b,wk,weights_proj,k_norm}.{weight,bias}", Replicated),
    ("{self_attention,mlp}_hyper_connection.{mapping_proj.weight,alpha_pre,alpha_post,alpha_res,bias}", Replicated),
    // one linear in the place of an attention or an MLP (`core/transformer/heterogeneous/linear_replacements.py`)
    ("{self_attention,mlp}.{weight,bias}",                  Split(0)),
    // dense MLP, shared experts, experts
    ("linear_fc1.{weight,bias}",                            Gated),
    ("linear_fc2.weight",                                   Split(1)),
    ("linear_fc2.bias",                                     Replicated),
    ("router.{weight,bias,expert_bias,qb_beta}",            Replicated),
    ("shared_experts.gate_weight",                          Replicated),
    ("{fc1_latent_proj,fc2_latent_proj}.{weight,bias}",     Replicated),
    // Mamba-2
    ("mixer.in_proj.{weight,bias}",                         Mamba(Fused::InProj)),
    ("mixer.conv1d.{weight,bias}",                          Mamba(Fused::Conv)),
    ("mixer.{A_log,dt_bias,D}",                             Split(0)),
    ("mixer.norm.{weight,bias}",                            Split(0)),
    ("mixer.out_proj.weight",                               Split(1)),
    ("mixer.out_proj.bias",                                 Replicated),
    // gated delta net
    ("self_attention.in_proj.weight",                       DeltaNet(Fused::InProj)),
    ("self_attention.conv1d.{weight,bias}",                 DeltaNet(Fused::Conv)),
    ("self_attention.{A_log,dt_bias}",                      DeltaNet(Fused::Heads)),
    ("self_attention.out_proj.weight",                      DeltaNet(Fused::OutProj)),
    ("self_attention.out_norm.{weight,bias}",               Replicated),
    // ... as MindSpeed-LLM writes Qwen3-Next: whole on every rank
    ("self_attention.{in_proj_qkvz,in_proj_ba,q_proj,k_proj,v_proj}.{weight,bias}", Replicated),
    // multi-token prediction
    ("{enorm,hnorm}.{weight,bias}",                         Replicated),
    ("eh_proj.{weight,bias}",                               Split(0)),
    // vision
    ("conv1.{weight,bias}",                                 Replicated),
    ("{class_token,mask_token,position_embeddings}",        Replicated),
    ("{ln_pre,ln_post}.{weight,bias}",                      Replicated),
    ("{embedder,video_embedder}.{weight,bias}",             Split(0)),
    ("{merger,patch_merger}.{linear_fc1,linear_fc2}.{weight,bias}", Replicated),
    // LoRA on parallel linears
    ("{linear_qkv,linear_q,linear_kv,linear_fc1,linear_q_proj,linear_q_up_proj,linear_kv_up_proj}.lora_A.default.weight", Replicated),
    ("{linear_qkv,linear_q,linear_kv,linear_q_proj,linear_q_up_proj,linear_kv_up_proj}.lora_B.default.weight", Split(0)),
    ("linear_fc1.lora_B.default.weight",                    Gated),
    ("{linear_proj,linear_fc2}.lora_A.default.weight",      Split(1)),
    ("{linear_proj,linear_fc2}.lora_B.default.weight",      Replicated),
];

/// The rules in force: the user's first, then those of the checkpoint itself, then a table.
#[derive(Debug)]
pub struct Rules {
    user: SuffixTable<Sharding>,
    /// By full name.
    checkpoint: HashMap<String, Sharding>,
    table: SuffixTable<Sharding>,
    /// The table is Megatron's, which has each of two twin modules under the name of one.
    has_twins: bool,
}

/// A rule from the command line that cannot be read.
#[derive(Debug, Error)]
#[error("rule `{rule}` is not of the form NAME=replicated|column|row|gated|vocab")]
pub struct BadRule {
    rule: String,
}

/// A sharding rule that the user adds: the end of a name, and its sharding.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UserRule {
    pattern: String,
    sharding: Sharding,
}

impl std::str::FromStr for UserRule {
    type Err = BadRule;

    fn from_str(rule: &str) -> Result<Self, Self::Err> {
        let parsed = rule.split_once('=').and_then(|(pattern, sharding)| {
            let sharding = match sharding.trim() {
                "replicated" => Replicated,
                "column" => Split(0),
                "row" => Split(1),
                "gated" => Halves,
                "vocab" => Vocab,
                _ => return None,
            };
            let pattern = pattern.trim();
            (!pattern.is_empty()).then(|| Self { pattern: pattern.to_owned(), sharding })
        });
        parsed.ok_or_else(|| BadRule { rule: rule.to_owned() })
    }
}

impl UserRule {
    /// Says whether the rule is for this name.
    #[must_use]
    pub fn matches(&self, name: &str) -> bool {
        SuffixTable::new([(self.pattern.as_str(), ())]).find(name).is_some()
    }
}

impl std::fmt::Display for UserRule {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.pattern)
    }
}

impl Rules {
    /// The table of canonical names, with the user's rules in front.
    #[must_use]
    pub fn new(user: &[UserRule]) -> Self {
        Self { has_twins: true, ..Self::of_table(RULES, user) }
    }

    /// Another table, for names that stay as they are stored, with the user's rules in front.
    #[must_use]
    pub fn of_table(table: &[(&str, Sharding)], user: &[UserRule]) -> Self {
        let user = user.iter().map(|rule| (rule.pattern.as_str(), rule.sharding.clone()));
        Self {
            user: SuffixTable::new(user),
            checkpoint: HashMap::new(),
            table: SuffixTable::new(table.iter().cloned()),
            has_twins: false,
        }
    }

    /// Adds what the checkpoint itself says of single names: it goes behind the user's rules and before the table.
    #[must_use]
    pub fn with_checkpoint(self, checkpoint: HashMap<String, Sharding>) -> Self {
        Self { checkpoint, ..self }
    }

    /// The rule for a name.
    #[must_use]
    pub fn find(&self, name: &str) -> Option<&Sharding> {
        let twin = || find_suffix(&self.table, &without_twin_numbers(name)?);
        find_suffix(&self.user, name)
            .or_else(|| self.checkpoint.get(name))
            .or_else(|| find_suffix(&self.table, name))
            .or_else(|| if self.has_twins { twin() } else { None })
    }
}

fn find_suffix<'t>(table: &'t SuffixTable<Sharding>, name: &str) -> Option<&'t Sharding> {
    table.find(name).map(|found| found.value)
}

/// LongCat has two of each module in a layer: `self_attention_0`, `mlps_1` are cut as `self_attention`, `mlp`. `None` for the
/// name of no such module.
fn without_twin_numbers(name: &str) -> Option<String> {
    let plain = |component| match stem_of_twin(component) {
        Some("mlps") => "mlp",
        Some(stem) => stem,
        None => component,
    };
    let has_twin = name.split('.').any(|component| stem_of_twin(component).is_some());
    has_twin.then(|| name.split('.').map(plain).collect::<Vec<_>>().join("."))
}

fn stem_of_twin(component: &str) -> Option<&str> {
    component.strip_suffix("_0").or(component.strip_suffix("_1"))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_norm_inside_a_mixer_is_split_and_one_before_it_is_not() {
        let rules = Rules::new(&[]);
        assert_eq!(rules.find("decoder.layers.0.mixer.norm.weight"), Some(&Split(0)));
        assert_eq!(rules.find("decoder.layers.0.norm.weight"), Some(&Replicated));
    }

    #[test]
    fn rules_match_whole_components() {
        let rules = Rules::new(&[]);
        assert_eq!(rules.find("decoder.layers.0.mlp.my_linear_fc2.weight"), None);
        assert_eq!(rules.find("decoder.layers.0.mlp.mystery.weight"), None);
    }

    #[test]
    fn one_linear_for_a_whole_module_is_split_by_its_rows() {
        let rules = Rules::new(&[]);
        for name in ["self_attention.weight", "mlp.weight", "mlp.bias"] {
            assert_eq!(rules.find(&format!("decoder.layers.0.{name}")), Some(&Split(0)), "{name}");
        }
    }

    #[test]
    fn a_users_rule_wins() {
        let rule: UserRule = "mlp.linear_fc2.weight=replicated".parse().unwrap();
        assert_eq!(
            Rules::new(&[rule]).find("decoder.layers.0.mlp.linear_fc2.weight"),
            Some(&Replicated)
        );
        assert!("mlp.linear_fc2.weight=sideways".parse::<UserRule>().is_err());
    }

    #[test]
    fn twin_modules_are_cut_as_single_ones() {
        let rules = Rules::new(&[]);
        assert_eq!(rules.find("decoder.layers.0.mlps_1.linear_fc1.weight"), Some(&Gated));
        assert_eq!(rules.find("decoder.layers.0.input_layernorm_0.weight"), Some(&Replicated));
    }

    #[test]
    fn twins_are_only_those_of_the_table_that_has_them() {
        let name = "decoder.layers.0.mlps_1.linear_fc1.weight";
        let user: UserRule = "mlp.linear_fc1.weight=replicated".parse().unwrap();
        assert_eq!(Rules::new(std::slice::from_ref(&user)).find(name), Some(&Gated));
        let own: &[(&str, Sharding)] = &[("{att,ffn}.weight", Split(0))];
        let rules = Rules::of_table(own, &[user]);
        assert_eq!(rules.find("layer.att.weight"), Some(&Split(0)));
        assert_eq!(rules.find("layer.att_0.weight"), None);
    }

    #[test]
    fn the_user_goes_before_the_checkpoint_and_the_checkpoint_before_the_table() {
        let name = "decoder.layers.0.mlp.linear_fc1.weight";
        let of_checkpoint = || HashMap::from([(name.to_owned(), Split(1))]);
        let rules = Rules::new(&[]).with_checkpoint(of_checkpoint());
        assert_eq!(rules.find(name), Some(&Split(1)));
        assert_eq!(rules.find("decoder.layers.1.mlp.linear_fc1.weight"), Some(&Gated));
        let user: UserRule = "weight=gated".parse().unwrap();
        let rules = Rules::new(&[user]).with_checkpoint(of_checkpoint());
        assert_eq!(rules.find(name), Some(&Halves));
    }
}

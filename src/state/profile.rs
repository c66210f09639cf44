//! Profiles, and the one table of what legitimately changes when a run is saved, loaded and saved again.

/// What of two checkpoints is compared.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Profile {
    /// The weights of the model.
    #[default]
    Weights,
    /// Everything; what a resume changes without changing the numbers of training is ignored.
    Resume,
    /// Everything, and nothing is ignored.
    Strict,
}

impl Profile {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Weights, Self::Resume, Self::Strict];

    /// The word for it on the command line.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Weights => "weights",
            Self::Resume => "resume",
            Self::Strict => "strict",
        }
    }

    /// What is compared, in few words.
    #[must_use]
    pub fn contents(self) -> &'static str {
        match self {
            Self::Weights => "the weights of the model alone",
            Self::Resume => "model, optimizer and state, but for the keys of state below",
            Self::Strict => "model, optimizer and state, nothing is ignored",
        }
    }

    /// The keys of state that are ignored.
    #[must_use]
    pub fn ignored(self) -> &'static [IgnoredRow] {
        match self {
            Self::Resume => IGNORED_ON_RESUME,
            Self::Weights | Self::Strict => &[],
        }
    }
}

/// A row of the table: keys that legitimately change on a resume.
#[derive(Debug)]
pub struct IgnoredRow {
    /// Key paths; `*` stands for any characters.
    pub keys: &'static [&'static str],
    /// The differences under them that are ignored.
    pub when: When,
    /// Why no number of training depends on them.
    pub reason: &'static str,
    /// The run in which they were seen to change.
    pub seen: &'static str,
}

/// The differences that a row ignores.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum When {
    /// Any.
    Always,
    /// Only that the two layouts have other parts, which cannot be compared one by one.
    PartsDiffer,
}

/// Megatron-LM core_r0.16.0 on two processes of a CPU, saved and loaded as it was.
const MEGATRON_AGAIN: &str = "Megatron-LM core 0.16, torch and torch_dist: save, load, save";
/// The same, with other layouts: tp2 to tp1, pp2 and dp2.
const MEGATRON_LAYOUTS: &str =
    "Megatron-LM core 0.16, torch_dist: saved with tp2, loaded and saved with tp1, pp2, dp2";
/// The same layout, with other options of logging, of saving and of the launch.
const MEGATRON_OPTIONS: &str =
    "Megatron-LM core 0.16, torch: loaded and saved with other such options";
const DEEPSPEED_OPTIONS: &str =
    "DeepSpeed 0.19, ZeRO-1 and 3: loaded and saved with other such options";
const TRAINER_AGAIN: &str = "transformers 5.23, Trainer: save, load, save to another folder";
const TRAINER_OPTIONS: &str =
    "transformers 5.23, Trainer: loaded and saved with other such options";

/// All that `--profile resume` ignores. Each row was seen in a real run, whose numbers of training do not depend on it.
pub const IGNORED_ON_RESUME: &[IgnoredRow] = &[
    IgnoredRow {
        keys: &["args.load", "args.save"],
        when: When::Always,
        reason: "folders of checkpoints",
        seen: MEGATRON_AGAIN,
    },
    IgnoredRow {
        keys: &["args.data_cache_path"],
        when: When::Always,
        reason: "folder of what can be made again",
        seen: MEGATRON_OPTIONS,
    },
    IgnoredRow {
        keys: &[
            "args.world_size",
            "args.data_parallel_size",
            "args.tensor_model_parallel_size",
            "args.expert_tensor_parallel_size",
            "args.pipeline_model_parallel_size",
            "args.transformer_pipeline_model_parallel_size",
            "args.inprocess_active_world_size",
        ],
        when: When::Always,
        reason: "the layout, which cuts the same model otherwise",
        seen: MEGATRON_LAYOUTS,
    },
    IgnoredRow {
        keys: &["*rng*", "random_states*"],
        when: When::PartsDiffer,
        reason: "random states are those of ranks, and another layout has others",
        seen: MEGATRON_LAYOUTS,
    },
    IgnoredRow {
        keys: &[
            "args.log_interval",
            "args.log_loss_scale_to_tensorboard",
            "args.log_memory_to_tensorboard",
            "args.log_num_zeros_in_grad",
            "args.log_params_norm",
            "args.log_progress",
            "args.log_throughput",
            "args.log_timers_to_tensorboard",
            "args.log_validation_ppl_to_tensorboard",
            "args.logging_level",
            "args.profile",
            "args.profile_step_start",
            "args.tensorboard_dir",
            "args.tensorboard_log_interval",
            "args.tensorboard_queue_size",
            "args.timing_log_level",
            "args.timing_log_option",
            "args.wandb_exp_name",
            "args.wandb_project",
            "args.wandb_save_dir",
        ],
        when: When::Always,
        reason: "logging and timing",
        seen: MEGATRON_OPTIONS,
    },
    IgnoredRow {
        keys: &[
            "args.distributed_timeout_minutes",
            "args.exit_duration_in_mins",
            "args.exit_interval",
            "args.exit_signal_handler",
            "args.non_persistent_save_interval",
            "args.save_interval",
        ],
        when: When::Always,
        reason: "when the job saves and when it ends",
        seen: MEGATRON_OPTIONS,
    },
    IgnoredRow {
        keys: &[
            "ds_config.csv_monitor.*",
            "ds_config.dump_state",
            "ds_config.memory_breakdown",
            "ds_config.steps_per_print",
            "ds_config.tensorboard.*",
            "ds_config.wall_clock_breakdown",
        ],
        when: When::Always,
        reason: "logging and timing",
        seen: DEEPSPEED_OPTIONS,
    },
    IgnoredRow {
        keys: &["training_args.output_dir"],
        when: When::Always,
        reason: "folder of checkpoints",
        seen: TRAINER_AGAIN,
    },
    IgnoredRow {
        keys: &[
            "training_args.disable_tqdm",
            "training_args.log_level",
            "training_args.logging_nan_inf_filter",
            "training_args.logging_steps",
            "training_args.run_name",
        ],
        when: When::Always,
        reason: "logging",
        seen: TRAINER_OPTIONS,
    },
    IgnoredRow {
        keys: &["training_args.save_steps", "training_args.save_total_limit"],
        when: When::Always,
        reason: "when the job saves, and how much it keeps",
        seen: TRAINER_OPTIONS,
    },
];

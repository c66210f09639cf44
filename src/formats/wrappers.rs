//! Names in state dicts of modules that FSDP, `torch.compile`, activation checkpointing or DDP wrap (torch 2.3 to 2.15).

/// Components that wrappers add wherever they wrap something.
const WRAPPERS: [&str; 4] =
    ["_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_fpw_module"];

/// The name without the components of wrappers; `module` is one only in front, where DDP puts it.
pub(super) fn without_wrappers(name: &str) -> String {
    let kept = name.split('.').filter(|part| !WRAPPERS.contains(part));
    let kept: Vec<&str> = kept.collect();
    let leading = kept.iter().take_while(|part| **part == "module").count();
    // A name that is nothing but wrappers keeps them.
    if leading == kept.len() { name.to_owned() } else { kept[leading..].join(".") }
}

/// Tells whether a name is that of the one flat parameter that FSDP makes of a module (`LOCAL_STATE_DICT`).
pub(super) fn is_flat_parameter(name: &str) -> bool {
    name.split('.').any(|part| part == "flat_param" || part == "_flat_param")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn components_of_wrappers_are_left_out() {
        for stored in [
            "module._orig_mod.layers.0.weight",
            "_orig_mod.module.layers.0.weight",
            "_fsdp_wrapped_module.layers.0._fsdp_wrapped_module._checkpoint_wrapped_module.weight",
        ] {
            assert_eq!(without_wrappers(stored), "layers.0.weight");
        }
        assert_eq!(without_wrappers("layers.0.module.weight"), "layers.0.module.weight");
        assert_eq!(without_wrappers("module"), "module");
    }
}

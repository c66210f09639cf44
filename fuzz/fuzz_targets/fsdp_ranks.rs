#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| ckptcmp_fuzz::fsdp_ranks(bytes));

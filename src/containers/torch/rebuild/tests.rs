//! Calls as the text protocol spells them, since that can be read, over one storage of sixteen bytes.

#![expect(clippy::unwrap_used, reason = "tests")]

use std::error::Error;

use super::super::testing::torch_file;
use super::*;

const STORAGE: &str = "(Vstorage\nctorch\nFloatStorage\nV0\nVcpu\nI4\ntQ";

/// The tensor that the pickle of one value stands for.
fn rebuild(pickle: &str) -> Result<Option<StoredTensor>, RebuildError> {
    let file = torch_file(format!("{pickle}.").as_bytes(), &[("0", &[0; 16])]).open().unwrap();
    file.tensor(file.root())
}

/// Like [`rebuild`] where a tensor is expected: dtype, shape, strides, offset and bytes of the storage.
fn read(pickle: &str) -> String {
    let tensor = rebuild(pickle).unwrap().unwrap();
    format!(
        "{} {:?} {:?} {} {}",
        tensor.dtype(),
        tensor.shape(),
        tensor.strides(),
        tensor.storage_offset(),
        tensor.storage().len
    )
}

/// Like [`rebuild`] where an error is expected: its words.
fn fails(pickle: &str) -> String {
    let error = rebuild(pickle).unwrap_err();
    error.source().map_or(error.to_string(), |source| format!("{error}: {source}"))
}

fn v2(storage: &str, rest: &str) -> String {
    format!("ctorch._utils\n_rebuild_tensor_v2\n({storage}{rest}I00\nNtR")
}

#[test]
fn views_of_every_function() {
    let view = "I1\n(I1\nI2\nt(I2\nI1\nt";
    let expected = "float32 [1, 2] [2, 1] 1 16";
    assert_eq!(read(&v2(STORAGE, view)), expected);
    assert_eq!(read(&format!("ctorch._utils\n_rebuild_tensor\n({STORAGE}{view}tR")), expected);
    let npu = "ctorch_npu.utils.storage\n_rebuild_npu_tensor\n";
    assert_eq!(read(&format!("{npu}({STORAGE}{view}I00\nNI29\ntR")), expected);
    let parameter = "ctorch._utils\n_rebuild_parameter";
    assert_eq!(read(&format!("{parameter}\n({}I01\nNtR", v2(STORAGE, view))), expected);
    assert_eq!(
        read(&format!("{parameter}_with_state\n({}I01\nN}}tR", v2(STORAGE, view))),
        expected
    );
    for family in ["torch", "mindtorch", "msadapter", "mindspore.x"] {
        let wrapped = format!(
            "c{family}._tensor\n_rebuild_from_type_v2\n(c{family}._utils\n_rebuild_tensor_v2\n\
             c{family}\nTensor\n({STORAGE}{view}I00\nNt}}tR"
        );
        assert_eq!(read(&wrapped), expected);
    }
}

#[test]
fn untyped_storages_take_the_dtype_of_the_third_version() {
    let untyped = STORAGE.replace("torch\nFloat", "torch.storage\nUntyped").replace("I4", "I16");
    let v3 = |dtype: &str, metadata: &str| {
        let rest = format!("I0\n(I2\nt(I1\ntI00\nN{dtype}{metadata}tR");
        format!("ctorch._utils\n_rebuild_tensor_v3\n({untyped}{rest}")
    };
    assert_eq!(read(&v3("ctorch\nfloat8_e4m3fn\n", "")), "float8_e4m3fn [2] [1] 0 16");
    assert_eq!(read(&v3("ctorch\nuint64\n", "}")), "uint64 [2] [1] 0 16");
    assert_eq!(fails(&v3("ctorch\nfloat4\n", "")), "dtype float4 is not supported");
    assert_eq!(fails(&v3("celsewhere\nfloat16\n", "")), "dtype float16 is not supported");
    assert_eq!(fails(&v3("N", "")), "dtype None is not supported");
    assert!(fails(&v3("ctorch\nuint8\n", "(Vconj\nI01\nd")).contains("lazily conjugated"));
    assert_eq!(
        fails(&v2(&untyped, "I0\n(t(t")),
        "storage 0: nothing says which dtype its bytes have"
    );
}

#[test]
fn strides_may_be_left_out() {
    for strides in ["N", "(t", "(l"] {
        let tensor = read(&v2(STORAGE, &format!("I0\n(I2\nI2\nt{strides}")));
        assert_eq!(tensor, "float32 [2, 2] [2, 1] 0 16");
    }
    assert_eq!(read(&v2(STORAGE, "I3\n(tN")), "float32 [] [] 3 16");
    assert_eq!(read(&v2(STORAGE, "I0\nctorch\nSize\n((I2\nttR(I2\nt")), "float32 [2] [2] 0 16");
}

#[test]
fn storages_are_named_in_several_ways() {
    let with = |from: &str, to: &str| v2(&STORAGE.replace(from, to), "I0\n(I2\ntN");
    let expected = "float32 [2] [1] 0 16";
    assert_eq!(read(&with("ctorch\nFloatStorage", "VFloatStorage")), expected);
    assert_eq!(read(&with("ctorch\nFloatStorage", "Vtorch.cuda.FloatStorage")), expected);
    assert_eq!(read(&with("ctorch\n", "ctorch.cuda\n")), expected);
    assert_eq!(read(&with("V0", "I0")), expected);
    assert_eq!(read(&with("I4\n", "I4\nN")), expected);
    assert_eq!(read(&with("I4\n", "I2\n")), "float32 [2] [1] 0 8");
    assert_eq!(read(&with("I4\n", "I4\n(V9\nI1\nI2\nt")), "float32 [2] [1] 0 8");
    // A storage without elements need not be in the file.
    let empty = STORAGE.replace("V0", "V5").replace("I4", "I0");
    assert_eq!(read(&v2(&empty, "I0\n(I0\nI3\ntN")), "float32 [0, 3] [3, 1] 0 0");
}

#[test]
fn rejects_storages_that_do_not_fit() {
    let with = |from: &str, to: &str| fails(&v2(&STORAGE.replace(from, to), "I0\n(I2\ntN"));
    let remedy = "copy or save the file again";
    assert_eq!(with("V0", "V5"), format!("storage 5 is not in the file; {remedy}"));
    assert_eq!(
        with("I4", "I5"),
        format!("storage 0 has 16 bytes, and 5 elements need 20; {remedy}")
    );
    assert!(with("I4", "L9223372036854775808L").contains("need 36893488147419103232"));
    assert_eq!(with("Float", "QInt8"), "storage 0: storage class QInt8Storage is not supported");
    assert_eq!(
        with("I4\n", "I4\n(V9\nI3\nI2\nt"),
        "storage 0: a view of elements 3 to 5 does not fit its 16 bytes"
    );
    assert_eq!(with("ctorch\n", "celsewhere\n"), "storage: its class is no storage class");
    assert_eq!(with("I4", "I-4"), "storage: its element count is no count");
    assert_eq!(with("V0\n", "N"), "storage: its key is no name");
    assert_eq!(with("I4\n", "I4\nI1\n"), "storage: its view is no range");
    assert_eq!(with("Vstorage", "Vmodule"), "_rebuild_tensor_v2: its first argument is no storage");
    assert_eq!(
        fails(&v2(STORAGE, "I3\n(I2\ntN")),
        "storage 0: shape [2] needs 20 bytes of a storage of 16 bytes"
    );
    assert!(
        fails(&v2("ctorch.storage\n_load_from_bytes\n)R", "I0\n(tN")).contains("inside the pickle")
    );
}

#[test]
fn rejects_arguments_that_are_none() {
    let fails = |rest: &str| fails(&v2(STORAGE, rest)).replace("_rebuild_tensor_v2: ", "");
    assert_eq!(fails("N(tN"), "its storage offset is no count");
    assert_eq!(fails("I-1\n(tN"), "its storage offset is no count");
    assert_eq!(fails("I0\nNN"), "its size is no tuple of counts");
    assert_eq!(fails("I0\n(I-1\ntN"), "its size is no tuple of counts");
    assert_eq!(fails("I0\n(I1\nt(I-1\nt"), "its strides are no tuple of counts");
    assert_eq!(fails("I0\n(I1\ntI1\n"), "its strides are no tuple of counts");
    assert!(fails("I0\n(I1\nt(I1\nI1\nt").ends_with("1 sizes but 2 strides"));
    let shape = "I4294967296\n".repeat(3);
    assert_eq!(fails(&format!("I0\n({shape}tN")), "its size is too large");
    let short = rebuild("ctorch._utils\n_rebuild_tensor_v2\n(NNtR").unwrap_err();
    assert!(matches!(short, RebuildError::Arguments { what: "it has too few arguments", .. }));
}

#[test]
fn rejects_wrappers_without_a_tensor() {
    let parameter = |inner: &str| format!("ctorch._utils\n_rebuild_parameter\n({inner}I00\nNtR");
    assert!(fails(&parameter("N")).ends_with("its first argument is no tensor"));
    assert!(
        fails(&parameter("ca\nb\n)R")).starts_with("a.b makes tensors in a way that is not known")
    );
    let from_type = "ctorch._tensor\n_rebuild_from_type_v2\n(NtR";
    assert!(fails(from_type).ends_with("it has too few arguments"));
    let no_tuple = "ctorch._tensor\n_rebuild_from_type_v2\n(ctorch._utils\n_rebuild_tensor\nNNNtR";
    assert!(fails(no_tuple).ends_with("its arguments are no tuple"));
}

#[test]
fn wrappers_of_wrappers_end() {
    let mut pickle = v2(STORAGE, "I0\n(tN");
    for _ in 0..LIMITS.depth {
        pickle = format!("ctorch._utils\n_rebuild_parameter\n({pickle}I00\nNtR");
    }
    assert!(matches!(rebuild(&pickle), Err(RebuildError::OverLimit(_))));
    // A list of arguments that holds the call itself.
    let cycle = "(lp0\n0ctorch._tensor\n_rebuild_from_type\n(ctorch._tensor\n_rebuild_from_type\nNg0\ntRp1\n0\
        g0\nctorch._tensor\n_rebuild_from_type\naNag0\na0g1\n";
    assert!(matches!(rebuild(cycle), Err(RebuildError::OverLimit(_))));
}

#[test]
fn calls_of_other_functions_are_no_tensors() {
    assert_eq!(rebuild("ctorch\ndevice\n(Vcpu\ntR"), Ok(None));
    assert_eq!(rebuild("cargparse\nNamespace\n)R"), Ok(None));
    assert_eq!(rebuild(STORAGE), Ok(None));
    assert_eq!(rebuild("ctransformer_engine.common.recipe\nDelayedScaling\n)R"), Ok(None));
    assert!(
        fails("celsewhere\n_rebuild_tensor_v2\n)R").starts_with("elsewhere._rebuild_tensor_v2 ")
    );
}

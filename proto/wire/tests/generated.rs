//! Checks that the checked-in code matches the .proto files. Builds of Longshore therefore need no protoc.
//!
//! After a change of a .proto file: `LONGSHORE_REGENERATE=1 cargo test -p longshore-wire --test generated`

use std::{env, fs, path::Path};

use prost::Message;

const FILES: [&str; 5] = [
    "longshore/v1/common.proto",
    "longshore/v1/training.proto",
    "longshore/v1/tensors.proto",
    "longshore/v1/admin.proto",
    "longshore/v1/memfd.proto",
];
const CODE: &str = "longshore.v1.rs";
/// The file with the descriptors of all messages and services and their comments, for gRPC reflection.
const DESCRIPTORS: &str = "longshore.v1.bin";

#[test]
fn checked_in_code_is_what_the_proto_files_say() {
    let package = Path::new(env!("CARGO_MANIFEST_DIR"));
    let kept = package.join("src/generated");
    let made = tempfile::tempdir().unwrap();
    generate(&package.join(".."), made.path());

    let regenerate = env::var_os("LONGSHORE_REGENERATE").is_some();
    for name in [CODE, DESCRIPTORS] {
        let made = fs::read(made.path().join(name)).unwrap();
        if regenerate {
            fs::write(kept.join(name), &made).unwrap();
        }
        assert!(
            fs::read(kept.join(name)).is_ok_and(|kept| kept == made),
            "{name} is not what the .proto files say; make it again: \
             LONGSHORE_REGENERATE=1 cargo test -p {} --test generated",
            env!("CARGO_PKG_NAME")
        );
    }
}

/// Checks that [`FILES`] has every .proto file.
#[test]
fn every_proto_file_is_compiled() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../longshore/v1");
    let mut found: Vec<String> = fs::read_dir(folder)
        .unwrap()
        .map(|entry| format!("longshore/v1/{}", entry.unwrap().file_name().into_string().unwrap()))
        .collect();
    found.sort();
    let mut compiled = FILES.map(str::to_string);
    compiled.sort();
    assert_eq!(found, compiled);
}

fn generate(protos: &Path, out: &Path) {
    let mut descriptors = protox::compile(FILES, [protos]).unwrap();
    fs::write(out.join(DESCRIPTORS), descriptors.encode_to_vec()).unwrap();
    // Comments stay in the .proto files, which are the documentation.
    descriptors.file.iter_mut().for_each(|file| file.source_code_info = None);
    // Fields of type `bytes` become `Bytes`, since a `Vec<u8>` would copy each payload once more.
    tonic_prost_build::configure()
        .bytes(".")
        .codec_path("crate::Codec")
        .out_dir(out)
        .compile_fds(descriptors)
        .unwrap();
}

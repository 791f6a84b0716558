//! Compiles the .proto files without a system protoc, and keeps the descriptors for gRPC reflection.

use std::{env, error::Error, fs, path::PathBuf};

use prost::Message;

const FILES: [&str; 5] = [
    "longshore/v1/common.proto",
    "longshore/v1/training.proto",
    "longshore/v1/tensors.proto",
    "longshore/v1/admin.proto",
    "longshore/v1/memfd.proto",
];

fn main() -> Result<(), Box<dyn Error>> {
    for file in FILES {
        println!("cargo:rerun-if-changed={file}");
    }
    if env::var_os("CARGO_FEATURE_WIRE").is_none() {
        return Ok(());
    }
    let descriptors = protox::compile(FILES, ["."])?;
    let out = PathBuf::from(env::var("OUT_DIR")?).join("longshore.v1.bin");
    fs::write(out, descriptors.encode_to_vec())?;
    // `bytes` fields as `Bytes`: as `Vec<u8>` each payload would be copied once more.
    tonic_prost_build::configure().bytes(".").compile_fds(descriptors)?;
    Ok(())
}

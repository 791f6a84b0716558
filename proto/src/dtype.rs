//! Element types on the wire and in images, numbered as in common.proto.

use crate::named::named;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Dtype {
    F32 = 1,
    F16 = 2,
    Bf16 = 3,
}

named!(Dtype, "dtype";
    F32 = "f32" | "fp32" | "float32",
    F16 = "f16" | "fp16" | "float16",
    Bf16 = "bf16" | "bfloat16",
);

impl Dtype {
    pub fn bytes(self) -> u64 {
        match self {
            Dtype::F32 => 4,
            Dtype::F16 | Dtype::Bf16 => 2,
        }
    }
}

//! The instruction set that runs the loops. A server detects it once and passes it as a value. An override
//! lets any machine take another's path, since all paths give the same bits.

use std::{env, fmt, str::FromStr};

/// All loops take 16 elements at a time: one register of AVX-512, two of AVX2, four of NEON.
pub(super) const LANES: usize = 16;

/// The environment variable that overrides [`Isa::detect`].
pub const ISA_VARIABLE: &str = "LONGSHORE_ISA";

/// An instruction set the kernels are written for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Isa {
    /// Plain Rust, the specification of all others.
    Scalar,
    /// x86-64 with AVX2, FMA and F16C (Haswell, Zen 1 and later).
    Avx2,
    /// x86-64 with AVX-512 F, BW, VL and DQ (Skylake-SP, Zen 4 and later).
    Avx512,
    /// NEON, which every AArch64 CPU has.
    Neon,
}

/// Reason that a requested instruction set cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum IsaError {
    #[error(
        "unknown instruction set \"{name}\"; set {ISA_VARIABLE} to one of scalar, avx2, avx512, neon, or unset it"
    )]
    Unknown { name: String },
    #[error("instruction set {asked} is not available on this CPU; set {ISA_VARIABLE} to one of {}, or unset it", list(.available))]
    Unavailable { asked: Isa, available: Vec<Isa> },
}

impl Isa {
    const ALL: [Isa; 4] = [Isa::Scalar, Isa::Avx2, Isa::Avx512, Isa::Neon];

    /// The best instruction set that this CPU has.
    pub fn detect() -> Isa {
        Isa::available().pop().unwrap_or(Isa::Scalar)
    }

    /// The instruction set that `LONGSHORE_ISA` names, or [`Isa::detect`] where it is unset or empty.
    pub fn from_env() -> Result<Isa, IsaError> {
        Isa::from_setting(
            env::var_os(ISA_VARIABLE).as_deref().map(|value| value.to_string_lossy()).as_deref(),
        )
    }

    fn from_setting(setting: Option<&str>) -> Result<Isa, IsaError> {
        let Some(name) = setting.map(str::trim).filter(|name| !name.is_empty()) else {
            return Ok(Isa::detect());
        };
        let asked: Isa = name.parse()?;
        if asked.is_available() {
            Ok(asked)
        } else {
            Err(IsaError::Unavailable { asked, available: Isa::available() })
        }
    }

    /// All instruction sets that this CPU has, slowest first. [`Isa::Scalar`] is always among them.
    pub fn available() -> Vec<Isa> {
        Isa::ALL.into_iter().filter(|isa| isa.is_available()).collect()
    }

    /// Returns true if this CPU has the instruction set. The standard library caches CPUID, so this costs a
    /// few loads.
    pub fn is_available(self) -> bool {
        match self {
            Isa::Scalar => true,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => {
                is_x86_feature_detected!("avx2")
                    && is_x86_feature_detected!("fma")
                    && is_x86_feature_detected!("f16c")
            }
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => {
                Isa::Avx2.is_available()
                    && is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512vl")
                    && is_x86_feature_detected!("avx512dq")
            }
            #[cfg(all(target_arch = "aarch64", target_endian = "little"))]
            Isa::Neon => true,
            #[allow(unreachable_patterns, reason = "which arms are left depends on the target")]
            _ => false,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Isa::Scalar => "scalar",
            Isa::Avx2 => "avx2",
            Isa::Avx512 => "avx512",
            Isa::Neon => "neon",
        }
    }
}

impl fmt::Display for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Isa {
    type Err = IsaError;

    fn from_str(name: &str) -> Result<Isa, IsaError> {
        let found = Isa::ALL.into_iter().find(|isa| isa.name().eq_ignore_ascii_case(name));
        found.ok_or_else(|| IsaError::Unknown { name: name.to_owned() })
    }
}

fn list(sets: &[Isa]) -> String {
    sets.iter().map(|isa| isa.name()).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn setting_is_read_and_refused_with_a_remedy() {
        assert_eq!(Isa::from_setting(None), Ok(Isa::detect()));
        assert_eq!(Isa::from_setting(Some("")), Ok(Isa::detect()));
        assert_eq!(Isa::from_setting(Some(" Scalar ")), Ok(Isa::Scalar));
        let unknown = Isa::from_setting(Some("sse9")).unwrap_err();
        assert!(
            unknown.to_string().contains("\"sse9\"") && unknown.to_string().contains("avx512"),
            "{unknown}"
        );
        let missing = if cfg!(target_arch = "x86_64") { "neon" } else { "avx2" };
        let refused = Isa::from_setting(Some(missing)).unwrap_err();
        assert!(matches!(refused, IsaError::Unavailable { .. }));
        assert!(
            refused.to_string().ends_with("or unset it") && refused.to_string().contains("scalar"),
            "{refused}"
        );
    }
}

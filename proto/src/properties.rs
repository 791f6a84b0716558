//! The table of tiers, and the properties that follow from a job's tier. Only the engine's `tier` folder matches on
//! tiers: all other code asks for these properties.

use crate::named::named;

macro_rules! tiers {
    ($($tier:ident = $number:literal, $name:literal, $lifetime:expr, durable_later: $durable_later:literal;)*) => {
        /// Place of a shard's master weights and optimizer state.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize)]
        #[serde(rename_all = "lowercase")]
        pub enum TierKind {
            $($tier = $number,)*
        }

        named!(TierKind, "tier"; $($tier = $name),*);

        impl TierKind {
            /// Returns the number in messages: `Tier` of common.proto.
            pub fn number(self) -> i32 {
                self as i32
            }

            pub fn properties(self) -> JobProperties {
                match self {
                    $(TierKind::$tier => JobProperties { lifetime: $lifetime, durable_later: $durable_later },)*
                }
            }
        }
    };
}

tiers! {
    Memory = 1, "memory", Lifetime::Process, durable_later: false;
    Shm = 2, "shm", Lifetime::Host, durable_later: false;
    Nvme = 3, "nvme", Lifetime::Drive, durable_later: true;
}

/// Lifetime of a job's state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Lifetime {
    /// The state ends with the server's process.
    Process,
    /// The state survives the process, in the host's memory: below a server's `--shm-dir`.
    Host,
    /// The state survives a power loss, on drives: below a server's `--state-dir`.
    Drive,
}

impl Lifetime {
    /// Returns the names of the tiers with this lifetime, for texts.
    pub fn tiers(self) -> String {
        TierKind::names(|tier| tier.properties().lifetime == self)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct JobProperties {
    pub lifetime: Lifetime,
    /// A commit is acknowledged before its version is durable. So rank 0 waits for durability before the next commit. A
    /// server may restart one version behind the others, and the job may step back one version.
    pub durable_later: bool,
}

impl JobProperties {
    pub fn survives_restart(&self) -> bool {
        self.lifetime > Lifetime::Process
    }
}

impl TierKind {
    pub fn from_number(number: i32) -> Option<TierKind> {
        TierKind::ALL.into_iter().find(|tier| tier.number() == number)
    }
}

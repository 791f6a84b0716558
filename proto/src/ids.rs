//! Newtypes for numbers with a meaning, so the compiler keeps a step apart from a version.

use std::fmt;

macro_rules! id {
    ($(#[$doc:meta])* $name:ident($inner:ty), $label:literal) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize)]
        #[serde(transparent)]
        pub struct $name(pub $inner);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!($label, " {}"), self.0)
            }
        }
    };
}

id!(/** A training step, from 1. Step s makes version s. */ Step(u64), "step");
id!(/** The number of decided steps. */ Version(u64), "version");
id!(/** A gradient accumulation step inside a step, from 0. */ MicroStep(u32), "micro-step");
id!(/** A data-parallel worker, from 0. */ Rank(u32), "rank");
id!(/** A slice of the flat space, in forward order, from 0. */ ShardId(u32), "shard");
id!(/** 64 Ki elements of the flat space, from 0; global, not within a shard. */ BlockId(u32), "block");
id!(/** A piece of at most 1 MiB of one shard's data on the wire, from 0. */ ChunkId(u32), "chunk");
id!(/** A server of a job, from 0: an index into the placement's servers. No number is given twice. */ ServerId(u32), "server");
id!(/** Rises each time a rank's process is replaced; the older one is fenced. */ Incarnation(u64), "incarnation");
id!(/** Rises with every change of a placement. */ Epoch(u64), "epoch");

impl Step {
    pub fn version(self) -> Version {
        Version(self.0)
    }
}

impl Version {
    pub fn next_step(self) -> Step {
        Step(self.0 + 1)
    }
}

impl ShardId {
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

impl Rank {
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

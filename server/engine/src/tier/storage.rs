//! The settings by which a server stores jobs, the inputs of a tier's opening, and its need.

use std::{path::PathBuf, str::FromStr, sync::Arc};

use longshore_proto::{Fault, JobSpec, Layout, Placement, ServerId, ShardId, Version};

use crate::io::{Drives, Engine, Metered, OpenDisk, OpenFile};

/// Number of buffers: one in the update, two in writing and three in reading. More did not make a step faster.
pub const DEFAULT_BUFFERS: usize = 6;

/// A server's settings for jobs whose tier outlives it.
#[derive(Clone)]
pub struct Storage {
    /// State directories. Each job gets a folder in each of them, and its shards are striped over all.
    pub dirs: Vec<PathBuf>,
    /// The folder of a tmpfs for jobs with tier `shm`.
    pub shm_dir: Option<PathBuf>,
    pub engine: Engine,
    /// Replaces files in tests.
    pub disks: Option<Arc<dyn OpenDisk>>,
    /// Counts the requests to the drives of `dirs`, for charts.
    pub drives: Option<Arc<Drives>>,
    /// DRAM for resident shards of an `nvme` job, which need not be read each step.
    pub resident_bytes: u64,
    /// True if images lie in memory that workers of this host may read.
    pub share_images: bool,
    /// Number of shards of an `nvme` job that are read, updated or written at once.
    pub buffers: usize,
    pub spill: Spill,
    /// Newest version that may be recovered. Set when the server's peers have lost a newer one.
    pub at_most: Option<Version>,
    /// Owner of the job that is opened, kept with the job.
    pub owner: Option<String>,
}

/// Inputs of a tier's opening: the job, its shards here, and the storage.
pub struct Inputs<'a> {
    pub spec: &'a JobSpec,
    pub layout: &'a Layout,
    pub owned: &'a [ShardId],
    pub placement: &'a Placement,
    pub server: ServerId,
    pub storage: &'a Storage,
}

/// The resources that a tier takes on a server, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StoreNeed {
    pub state: u64,
    /// DRAM for buffers: between the state and the drives, or for copies of blocks that are being updated.
    pub buffers: u64,
    /// Space on drives.
    pub disk: u64,
    /// Bytes that a step writes to drives, without tables and records.
    pub written: u64,
}

/// The parts of an `nvme` job that live on the drives.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Deserialize)]
#[serde(try_from = "String")]
pub enum Spill {
    #[default]
    State,
    /// Images too, and gradients that are not lent. DRAM holds the newest images, and pulls read the others from the
    /// drives. Chunks are written to the drives on arrival, and sums once they are formed. Updates read both back.
    All,
}

impl Spill {
    pub fn name(self) -> &'static str {
        match self {
            Spill::State => "state",
            Spill::All => "all",
        }
    }
}

impl FromStr for Spill {
    type Err = Fault;

    fn from_str(text: &str) -> Result<Spill, Fault> {
        match text {
            "state" => Ok(Spill::State),
            "all" => Ok(Spill::All),
            "images" => {
                let remedy = "choose all: gradients go to the drives too, and folders made with images open";
                Err(Fault::invalid("spill", text, "state or all", remedy))
            }
            _ => Err(Fault::invalid("spill", text, "state or all", "name one of them")),
        }
    }
}

impl TryFrom<String> for Spill {
    type Error = Fault;

    fn try_from(text: String) -> Result<Spill, Fault> {
        text.parse()
    }
}

impl Storage {
    /// Returns all directories in which jobs are stored.
    pub fn folders(&self) -> Vec<PathBuf> {
        self.dirs.iter().chain(&self.shm_dir).cloned().collect()
    }

    /// Returns the opener of the files of `nvme` jobs.
    pub(super) fn opener(&self) -> Arc<dyn OpenDisk> {
        let opener = self.disks.clone().unwrap_or_else(|| Arc::new(OpenFile { engine: self.engine }));
        match self.drives.clone() {
            Some(drives) => Arc::new(Metered { opener, drives }),
            None => opener,
        }
    }
}

impl Default for Storage {
    fn default() -> Storage {
        Storage {
            dirs: Vec::new(),
            shm_dir: None,
            engine: Engine::Auto,
            disks: None,
            drives: None,
            resident_bytes: 0,
            share_images: true,
            buffers: DEFAULT_BUFFERS,
            spill: Spill::State,
            at_most: None,
            owner: None,
        }
    }
}

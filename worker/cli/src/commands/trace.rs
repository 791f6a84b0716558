//! `--trace FILE`: begin, end and thread of each stage of a step, in Chrome's trace format.

use std::{
    fs::File,
    io::BufWriter,
    path::{Path, PathBuf},
};

use anyhow::Context;
use longshore_server::log::Reader;
use tracing_chrome::{ChromeLayerBuilder, FlushGuard};
use tracing_subscriber::{Layer, filter::Targets};

/// Target of spans that are stages, in every crate.
const STAGE: &str = "stage";

#[derive(clap::Args, Clone)]
pub(super) struct TraceFlag {
    /// Write when each stage ran to this file, for ui.perfetto.dev
    #[arg(long, value_name = "FILE")]
    pub(super) trace: Option<PathBuf>,
}

/// Starts the trace. The file is complete once the guard is dropped.
pub(super) fn to(path: &Path) -> anyhow::Result<(Reader, FlushGuard)> {
    let file = File::create(path).with_context(|| format!("--trace {}", path.display()))?;
    let (layer, guard) = ChromeLayerBuilder::new().writer(BufWriter::new(file)).include_args(true).build();
    Ok((layer.with_filter(Targets::new().with_target(STAGE, tracing::Level::DEBUG)).boxed(), guard))
}

//! `longshore import`: fills a new job with weights from safetensors of other programs.

use anyhow::Context;
use serde_json::json;

use crate::{
    import::{self, Args},
    output::Output,
    sizes::human,
};

pub(super) fn run(args: &Args, out: Output) -> anyhow::Result<()> {
    let begun = std::time::Instant::now();
    let imported = import::run(&args.servers.connect()?, args, out)
        .with_context(|| format!("job {} was not filled from {}", args.job, args.from.display()))?;
    let seconds = begun.elapsed().as_secs_f64();
    if out.is_json() {
        let said = json!({
            "job": args.job, "params": imported.params, "elements": imported.elements, "seconds": seconds,
        });
        say!("{said}");
        return Ok(());
    }
    say!(
        "job {}: {} parameters, {} of fp32 weights from {}, {:.1} s",
        args.job,
        imported.params,
        human(4 * imported.elements),
        args.from.display(),
        seconds
    );
    Ok(())
}

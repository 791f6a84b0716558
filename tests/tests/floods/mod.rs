//! What strangers on the socket can do. Whatever they send, a server holds no more than docs/limits.md says, ends the
//! connections of those who go too far, and serves the others. With `LONGSHORE_SOAK` the floods are as large as those
//! that once took 4.6 GB.

mod beside;
mod connections;
mod cost;
mod frames;
mod handshakes;
mod strangers;

use longshore_tests::{
    process::{forget_peak, memory_of},
    server::Longshored,
};

/// By how much a server's memory grows at the highest while something is done to it, and after that.
fn growth(server: &Longshored, flood: impl FnOnce()) -> (u64, u64) {
    let process = server.process.id();
    forget_peak(process);
    let (before, _) = memory_of(process);
    flood();
    let (after, most) = memory_of(process);
    let (most, after) = (most.saturating_sub(before), after.saturating_sub(before));
    eprintln!("{:.1} MiB more at the highest, {:.1} after it", mib(most), mib(after));
    (most, after)
}

fn mib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}

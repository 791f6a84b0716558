//! Floods by strangers on the socket. Against any flood, a server holds no more than docs/limits.md allows, ends
//! excessive connections, and serves the others. With `LONGSHORE_SOAK` the floods are so large that an earlier server
//! took 4.6 GB for them.

mod beside;
mod connections;
mod handshakes;
mod limits;
mod strangers;

use longshore_tests::{
    process::{forget_peak, memory_of},
    server::Longshored,
};

/// Returns the growth of a server's memory during `flood`: its peak, and its value afterwards.
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

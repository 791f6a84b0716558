//! Strangers that stop within TLS: at each stage of the handshake, and in half a record after it.

use longshore_proto::limits::{HANDSHAKE_BYTES, MAX_HANDSHAKES, STRANGERS_TLS_BYTES};
use longshore_tests::{server::ServerOptions, soak};

use super::{
    growth, mib,
    strangers::{Stop, Strangers},
};

#[test]
fn who_stops_within_tls_makes_a_server_hold_what_is_counted() {
    let strangers = Strangers::new();
    for stop in [Stop::Silent, Stop::HalfHello, Stop::LongHello, Stop::Hello, Stop::Shaken, Stop::HalfRecord]
    {
        let full = "all connections are taken";
        let server = ServerOptions::new().tls(&strangers.folders.server()).allow(full).start();
        let mut came = Vec::new();
        eprint!("{stop:?}: ");
        let (most, _) = growth(&server, || {
            // The server ends some strangers in favour of others before they reach this stage.
            came.extend(
                (0..soak::pick(300, 2000)).filter_map(|_| strangers.come(server.address(), stop).ok()),
            );
        });
        assert!(came.len() > soak::pick(150, 1000), "{} came", came.len());
        let counted = match stop {
            Stop::Shaken | Stop::HalfRecord => STRANGERS_TLS_BYTES,
            _ => MAX_HANDSHAKES * HANDSHAKE_BYTES,
        };
        assert!(most < counted as u64, "{stop:?}: {} MiB", mib(most));
    }
}

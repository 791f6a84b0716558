//! Rate limits of useless traffic: for each connection, and for all strangers' connections of one address together.
//!
//! With a limit for each connection alone, a flood would continue on the next connection.

use std::{
    hash::{BuildHasher, RandomState},
    net::{IpAddr, Ipv6Addr},
    sync::Mutex,
    time::Instant,
};

use super::lock;

/// Bytes of useless traffic that an address may send at once, and that it gets back each second. A useless frame costs
/// 1 KiB (`conduct.rs`), so the burst is 4,096 pings, 512 calls or 256 resets. Each connection has some allowance of
/// its own besides.
const ALLOWANCE_BYTES: u64 = 4 * 1024 * 1024;
/// Number of allowances. Addresses with colliding hashes share an allowance. The hash has a secret key, so attackers
/// cannot choose collisions.
const COUNT: usize = 1024;
/// Network bits of an IPv6 address. A host owns all addresses of a /64 network.
const NETWORK: u128 = !0 << 64;

/// The allowances of addresses.
pub(super) struct Allowances {
    hasher: RandomState,
    all: Box<[Mutex<Allowance>]>,
}

/// A token bucket of bytes.
#[derive(Clone, Copy)]
pub(super) struct Allowance {
    left: u64,
    /// Capacity, which is also the refill of one second.
    most: u64,
    /// Time of the last refill.
    renewed: Instant,
}

impl Allowance {
    pub(super) fn new(left: u64, most: u64) -> Allowance {
        Allowance { left, most, renewed: Instant::now() }
    }

    pub(super) fn add(&mut self, bytes: u64) {
        self.left = self.left.saturating_add(bytes).min(self.most);
    }

    /// Takes `bytes` without a refill. Returns false, and takes nothing, if fewer are left.
    pub(super) fn spend(&mut self, bytes: u64) -> bool {
        let left = self.left.checked_sub(bytes);
        self.left = left.unwrap_or(self.left);
        left.is_some()
    }

    /// Takes `bytes`, after a refill if fewer are left. The refill is for the time since the last one, at most a
    /// second.
    pub(super) fn take(&mut self, bytes: u64, now: Instant) -> bool {
        if self.left < bytes {
            let since = now.saturating_duration_since(self.renewed).as_secs_f64();
            self.add((since.min(1.0) * self.most as f64) as u64);
            self.renewed = now;
        }
        self.spend(bytes)
    }
}

/// Index of an address in [`Allowances`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Place(usize);

impl Allowances {
    pub(super) fn place(&self, address: IpAddr) -> Place {
        Place(self.hasher.hash_one(network(address)) as usize % COUNT)
    }

    /// Takes `bytes` from the address's allowance. Returns false, and takes nothing, if fewer are left.
    pub(super) fn take(&self, Place(place): Place, bytes: u64) -> bool {
        lock(&self.all[place]).take(bytes, Instant::now())
    }
}

/// Returns the part of an address that tells hosts apart.
pub fn network(address: IpAddr) -> IpAddr {
    match address {
        IpAddr::V6(address) => IpAddr::V6(Ipv6Addr::from_bits(address.to_bits() & NETWORK)),
        IpAddr::V4(_) => address,
    }
}

impl Default for Allowances {
    fn default() -> Allowances {
        let whole = Allowance::new(ALLOWANCE_BYTES, ALLOWANCE_BYTES);
        Allowances { hasher: RandomState::new(), all: (0..COUNT).map(|_| Mutex::new(whole)).collect() }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn an_allowance_comes_again_with_time() {
        let mut left = Allowance::new(ALLOWANCE_BYTES, ALLOWANCE_BYTES);
        let now = left.renewed;
        assert!(left.take(ALLOWANCE_BYTES, now));
        assert!(!left.take(1, now));
        let soon = now + Duration::from_millis(500);
        assert!(!left.take(ALLOWANCE_BYTES, soon), "half of it is there");
        assert!(left.take(ALLOWANCE_BYTES / 2, soon));
        let later = now + Duration::from_secs(1000);
        assert!(left.take(ALLOWANCE_BYTES, later));
        assert!(!left.take(1, later), "nothing is saved beyond one second's");
    }

    #[test]
    fn addresses_of_one_host_share() {
        let allowances = Allowances::default();
        let place = |text: &str| allowances.place(text.parse().unwrap());
        assert_eq!(place("2001:db8::1"), place("2001:db8::ffff:1"));
        let hosts = (0..100).map(|host| place(&format!("10.0.0.{host}")).0);
        assert!(hosts.collect::<std::collections::HashSet<_>>().len() > 80);
    }
}

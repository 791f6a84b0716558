//! Counts the bytes that devices and pools lease, against a limit. A budget allocates no memory itself.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering::Relaxed},
};

use crate::error::Shortage;

/// A limit in bytes with its leases. Clones share one account.
#[derive(Clone, Debug)]
pub struct Budget(Arc<Account>);

#[derive(Debug)]
struct Account {
    device: String,
    limit: u64,
    used: AtomicU64,
    peak: AtomicU64,
}

impl Budget {
    /// Makes a budget of `limit` bytes. `device` names it in errors.
    pub fn new(device: impl Into<String>, limit: u64) -> Budget {
        let account =
            Account { device: device.into(), limit, used: AtomicU64::new(0), peak: AtomicU64::new(0) };
        Budget(Arc::new(account))
    }

    /// A budget that counts without refusing.
    pub fn unlimited(device: impl Into<String>) -> Budget {
        Budget::new(device, u64::MAX)
    }

    pub fn name(&self) -> &str {
        &self.0.device
    }

    /// The limit in bytes.
    pub fn limit(&self) -> u64 {
        self.0.limit
    }

    /// Bytes leased now.
    pub fn used(&self) -> u64 {
        self.0.used.load(Relaxed)
    }

    /// The most bytes leased at once so far.
    pub fn peak(&self) -> u64 {
        self.0.peak.load(Relaxed)
    }

    pub fn free(&self) -> u64 {
        self.limit().saturating_sub(self.used())
    }

    /// Leases `bytes` until the lease is dropped.
    pub fn reserve(&self, field: &str, bytes: u64) -> Result<Lease, Shortage> {
        let take = |used: u64| used.checked_add(bytes).filter(|&used| used <= self.0.limit);
        match self.0.used.fetch_update(Relaxed, Relaxed, take) {
            Ok(before) => {
                self.0.peak.fetch_max(before + bytes, Relaxed);
                Ok(Lease { budget: self.clone(), bytes })
            }
            Err(used) => Err(Shortage {
                device: self.0.device.clone(),
                field: field.into(),
                asked: bytes,
                free: self.0.limit - used.min(self.0.limit),
                budget: self.0.limit,
                remedy: "raise the budget, use stage 3 or a smaller batch, or see `longshore plan`",
            }),
        }
    }
}

/// Bytes taken from a budget, returned on drop.
#[derive(Debug)]
pub struct Lease {
    budget: Budget,
    bytes: u64,
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.budget.0.used.fetch_sub(self.bytes, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_budget_refuses_names_the_shortage_and_recovers() {
        let budget = Budget::new("gpu", 100);
        let lease = budget.reserve("weights", 70).unwrap();
        let shortage = budget.reserve("activations", 31).unwrap_err();
        assert_eq!((shortage.asked, shortage.free, shortage.budget), (31, 30, 100));
        assert_eq!(shortage.field, "activations");
        drop(lease);
        assert_eq!((budget.used(), budget.peak()), (0, 70));
        budget.reserve("activations", 100).unwrap();
        assert!(budget.reserve("overflow", u64::MAX).is_err());
    }
}

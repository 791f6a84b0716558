//! How a caller ends a wait from outside. A caller in Python needs this: Python handles signals only between its own
//! instructions.

use std::{fmt, sync::Arc, time::Duration};

/// How often a waiting call asks.
pub(super) const PERIOD: Duration = Duration::from_millis(50);

/// A question that a waiting call asks on its own thread, twenty times a second. The wait ends with
/// [`Interrupted`](crate::error::Interrupted) when the answer is true. By default nothing is asked.
#[derive(Clone, Default)]
pub struct Interrupt(pub(super) Option<Arc<dyn Fn() -> bool + Send + Sync>>);

impl Interrupt {
    pub fn when(asks: impl Fn() -> bool + Send + Sync + 'static) -> Interrupt {
        Interrupt(Some(Arc::new(asks)))
    }
}

impl fmt::Debug for Interrupt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.0.is_some() { "Interrupt(by a function)" } else { "Interrupt(never)" })
    }
}

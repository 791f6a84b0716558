//! Ends a blocking call from outside. Python callers need this: Python handles signals only between its own
//! instructions.

use std::{fmt, sync::Arc, time::Duration};

/// The period of the question, in a waiting call.
pub(super) const PERIOD: Duration = Duration::from_millis(50);

/// A question that a waiting call asks on its own thread, twenty times a second. The answer true ends the wait
/// with [`Interrupted`](crate::error::Interrupted). The default asks nothing.
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

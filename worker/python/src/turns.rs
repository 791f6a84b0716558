//! A value that one call uses at a time. A call that waits for its turn ends with Ctrl-C.

use std::{
    sync::{Condvar, Mutex, PoisonError, TryLockError},
    time::Duration,
};

use longshore_worker::{Result, error::Interrupted};

/// The period at which a waiting call asks whether to go on.
const PERIOD: Duration = Duration::from_millis(50);

pub(crate) struct Turns<T> {
    value: Mutex<T>,
    /// Number of calls that have ended.
    ended: Mutex<u64>,
    changed: Condvar,
}

impl<T> Turns<T> {
    pub(crate) fn new(value: T) -> Turns<T> {
        Turns { value: Mutex::new(value), ended: Mutex::new(0), changed: Condvar::new() }
    }

    /// Runs `act` once no other call uses the value. While the call waits, `ends` is called on this thread, and the
    /// answer true ends the wait.
    ///
    /// # Errors
    /// `Interrupted` if `ends` returned true; the error of `act`.
    pub(crate) fn with<R>(
        &self,
        ends: impl Fn() -> bool,
        act: impl FnOnce(&mut T) -> Result<R>,
    ) -> Result<R> {
        loop {
            let seen = *self.ended.lock().unwrap_or_else(PoisonError::into_inner);
            let mut value = match self.value.try_lock() {
                Ok(value) => value,
                Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
                Err(TryLockError::WouldBlock) => {
                    let ended = self.ended.lock().unwrap_or_else(PoisonError::into_inner);
                    let waited = self.changed.wait_timeout_while(ended, PERIOD, |ended| *ended == seen);
                    // `ends` may call this function again, as a signal handler does.
                    if waited.unwrap_or_else(PoisonError::into_inner).1.timed_out() && ends() {
                        return Err(Interrupted.into());
                    }
                    continue;
                }
            };
            let result = act(&mut value);
            drop(value);
            *self.ended.lock().unwrap_or_else(PoisonError::into_inner) += 1;
            self.changed.notify_all();
            return result;
        }
    }

    /// Returns the value without a lock: `&mut self` excludes other calls.
    pub(crate) fn get_mut(&mut self) -> &mut T {
        self.value.get_mut().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::{
        sync::{Arc, mpsc},
        thread,
    };

    use longshore_worker::Error;

    use super::*;

    #[test]
    fn calls_follow_each_other_and_one_that_waits_can_be_ended() {
        let turns = Arc::new(Turns::new(0));
        let ((begun, begins), (end, ends)) = (mpsc::channel(), mpsc::channel());
        let first = thread::spawn({
            let turns = turns.clone();
            move || {
                turns.with(
                    || false,
                    |value| {
                        begun.send(()).unwrap();
                        ends.recv().unwrap();
                        *value += 1;
                        Ok(())
                    },
                )
            }
        });
        begins.recv().unwrap();
        let ended = turns.with(|| true, |_| Ok(()));
        assert!(matches!(ended, Err(Error::Interrupted(_))));
        end.send(()).unwrap();
        assert_eq!(turns.with(|| false, |value| Ok(*value)).unwrap(), 1);
        first.join().unwrap().unwrap();
        let mut turns = Arc::into_inner(turns).unwrap();
        assert_eq!(*turns.get_mut(), 1);
    }
}

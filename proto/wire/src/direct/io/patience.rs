//! Deadlines of a server's connection: for its first frame, its first call, and for room.

use std::{
    io,
    pin::Pin,
    task::{Context, Poll},
    time::{Duration, Instant},
};

use longshore_proto::limits::{FIRST_CALL_DEADLINE, PREFACE_DEADLINE, UNFINISHED_SHARE_BYTES};
use tokio::time::{Sleep, sleep_until};

use super::{Direct, Inward};
use crate::direct::{conduct::Breach, socket::Socket};

/// Deadline of a connection whose unfinished frames and messages exceed the strangers' shared room. The connection is
/// not read while it waits for room.
const ROOM_DEADLINE: Duration = Duration::from_secs(10);
/// Interval at which a connection without room checks for room.
const ROOM_POLL: Duration = Duration::from_millis(20);

#[derive(Default)]
pub(super) struct Patience {
    /// The first frame has come.
    pub(super) greeted: bool,
    /// Start of the wait for room.
    crowded: Option<Instant>,
    timer: Option<Pin<Box<Sleep>>>,
}

impl Patience {
    /// Returns whether the time `at` has come. Otherwise the task wakes at that time.
    fn is_due(&mut self, context: &mut Context<'_>, at: Instant) -> bool {
        let timer = self.timer.get_or_insert_with(|| Box::pin(sleep_until(at.into())));
        if timer.deadline() != at.into() {
            timer.as_mut().reset(at.into());
        }
        timer.as_mut().poll(context).is_ready()
    }
}

impl<S: Socket> Direct<S> {
    /// Returns whether the connection is not known to be a rank's.
    pub(super) fn is_stranger(&self) -> bool {
        self.guest.as_ref().is_some_and(|guest| !guest.standing.account.is_vouched())
    }

    /// Ends a silent connection, and a connection that the server wants to end. Suspends a connection without room.
    pub(super) fn poll_patience(&mut self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let unfinished = self.unfinished();
        let Some(guest) = &mut self.guest else { return Poll::Ready(Ok(())) };
        if matches!(self.inward, Inward::Over) {
            return Poll::Ready(Ok(()));
        }
        let (began, called, ends) = (guest.began(), guest.standing.has_called(), guest.is_to_end());
        if !guest.hold(unfinished.saturating_sub(UNFINISHED_SHARE_BYTES)) {
            return self.poll_room(context);
        }
        self.patience.crowded = None;
        if ends {
            self.say_good_bye(context, 0);
        } else if called {
            self.patience.timer = None;
        } else if !self.patience.greeted {
            if self.patience.is_due(context, began + PREFACE_DEADLINE) {
                tracing::debug!("connection without a word");
                return Poll::Ready(Err(io::ErrorKind::TimedOut.into()));
            }
        } else if self.patience.is_due(context, began + FIRST_CALL_DEADLINE) {
            self.say_good_bye(context, 0);
        }
        Poll::Ready(Ok(()))
    }

    fn poll_room(&mut self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let since = *self.patience.crowded.get_or_insert_with(Instant::now);
        if since.elapsed() >= ROOM_DEADLINE {
            return Poll::Ready(Err(self.cut_off(context, Breach::Excess)));
        }
        if self.patience.is_due(context, Instant::now() + ROOM_POLL) {
            context.waker().wake_by_ref();
        }
        Poll::Pending
    }

    /// Returns the bytes kept here or in h2 because their frame or message is incomplete.
    fn unfinished(&self) -> usize {
        if !self.is_stranger() {
            return 0;
        }
        let passing = match self.inward {
            Inward::Pass { left } if left > 0 => self.passing - left.min(self.passing),
            _ => 0,
        };
        let kept: usize = self.streams.iter().map(|stream| stream.tap.state().kept_bytes()).sum();
        passing + kept
    }
}

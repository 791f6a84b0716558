//! Takes the messages of one stream to where they belong, whether they come through h2 or past it.

use std::{
    io,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use bytes::Bytes;
use longshore_proto::fault::Fault;
use tokio::sync::Notify;

use super::{Event, Frame, Parser};
use crate::direct::{Mode, Read, Sink};

/// Where a stream's messages go. None of these methods may wait.
pub trait Land<M>: Send {
    /// Takes the head of a message, whose payload of `bytes` follows. False means that it cannot be taken yet;
    /// nothing more is given before [`Shared::go_on`].
    ///
    /// # Errors
    /// The fault that ends the stream.
    fn begin(&mut self, head: M, bytes: usize) -> Result<bool, Fault>;

    /// Whether the payload can be read straight to its place.
    fn is_direct(&self) -> bool;

    /// Takes the next bytes of the payload.
    fn put(&mut self, slice: &[u8]);

    /// Does what [`Sink::read`] does.
    fn read(&mut self, most: usize, read: &mut Read<'_>) -> io::Result<usize>;

    /// The message is whole. True means that the stream's task must look.
    ///
    /// # Errors
    /// The fault that ends the stream.
    fn end(&mut self) -> Result<bool, Fault>;
}

/// A stream's parser, and where its messages go.
pub struct Intake<M, L> {
    parser: Parser<M>,
    pub land: L,
    stalled: bool,
    fault: Option<Fault>,
    /// How many bytes were taken, which tells silence from slowness.
    received: u64,
    changed: Arc<Notify>,
}

impl<M: Frame, L: Land<M>> Intake<M, L> {
    /// Why the stream cannot go on.
    pub fn fault(&self) -> Option<&Fault> {
        self.fault.as_ref()
    }

    pub fn is_stalled(&self) -> bool {
        self.stalled
    }

    pub fn received(&self) -> u64 {
        self.received
    }

    pub fn is_between_messages(&self) -> bool {
        self.parser.is_between_messages()
    }

    /// Checks that the stream did not end inside a message.
    pub fn finish(&self) -> Result<(), Fault> {
        self.fault.clone().map_or_else(|| self.parser.finish(), Err)
    }

    /// Takes bytes until they are used up or it stalls.
    fn take(&mut self, bytes: &mut Bytes) {
        let before = bytes.len();
        while !self.stalled && self.fault.is_none() {
            match self.step(bytes) {
                Ok(true) => {}
                Ok(false) => break,
                Err(fault) => {
                    self.fault = Some(fault);
                    self.changed.notify_one();
                }
            }
        }
        if self.fault.is_some() {
            bytes.clear();
        }
        self.received += (before - bytes.len()) as u64;
    }

    fn step(&mut self, bytes: &mut Bytes) -> Result<bool, Fault> {
        match self.parser.next(bytes)? {
            None => return Ok(false),
            Some(Event::Head(head, payload)) => {
                self.stalled = !self.land.begin(head, payload)?;
                if self.stalled {
                    self.changed.notify_one();
                }
            }
            Some(Event::Payload(slice)) => self.land.put(&slice),
            Some(Event::End) => {
                if self.land.end()? {
                    self.changed.notify_one();
                }
            }
        }
        Ok(true)
    }
}

/// An intake that the stream's task and the connection's task share.
pub struct Shared<M, L> {
    intake: Arc<Mutex<Intake<M, L>>>,
    changed: Arc<Notify>,
}

impl<M, L> Clone for Shared<M, L> {
    fn clone(&self) -> Self {
        Shared { intake: Arc::clone(&self.intake), changed: Arc::clone(&self.changed) }
    }
}

impl<M: Frame, L: Land<M>> Shared<M, L> {
    pub fn new(land: L) -> Shared<M, L> {
        let changed = Arc::new(Notify::new());
        let intake = Intake {
            parser: Parser::new(),
            land,
            stalled: false,
            fault: None,
            received: 0,
            changed: Arc::clone(&changed),
        };
        Shared { intake: Arc::new(Mutex::new(intake)), changed }
    }

    pub fn lock(&self) -> MutexGuard<'_, Intake<M, L>> {
        self.intake.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes what came through h2. What it leaves is to be given again once it does not stall.
    pub fn take(&self, bytes: &mut Bytes) {
        self.lock().take(bytes);
    }

    /// Goes on after a stall: what it waited for is there.
    pub fn go_on(&self) {
        let mut intake = self.lock();
        intake.stalled = false;
        // A message without a payload ends here.
        intake.take(&mut Bytes::new());
    }

    /// Waits until there is something to look at: a fault, a stall, or what [`Land::end`] says.
    pub async fn changed(&self) {
        self.changed.notified().await;
    }
}

impl<M: Frame, L: Land<M>> Sink for Shared<M, L> {
    fn mode(&mut self) -> Mode {
        let intake = self.lock();
        let payload = intake.parser.payload_left();
        match () {
            () if intake.fault.is_some() => Mode::Payload,
            () if intake.stalled => Mode::Stalled,
            () if payload == 0 => Mode::Fields,
            () if intake.land.is_direct() => Mode::Direct(payload),
            () => Mode::Payload,
        }
    }

    fn put(&mut self, bytes: &mut Bytes) {
        self.take(bytes);
    }

    fn read(&mut self, most: usize, read: &mut Read<'_>) -> io::Result<usize> {
        let mut intake = self.lock();
        let count = intake.land.read(most, read)?;
        intake.parser.skip(count);
        intake.received += count as u64;
        if intake.parser.payload_left() == 0 {
            intake.take(&mut Bytes::new());
        }
        Ok(count)
    }
}

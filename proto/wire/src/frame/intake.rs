//! Delivery of one stream's messages to their sink, through h2 or past it.

use std::{
    io,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use bytes::Bytes;
use longshore_proto::fault::Fault;
use tokio::sync::Notify;

use super::{Event, Frame, Parser};
use crate::sink::{MessageSink, Mode, Read, Sink};

/// A stream's parser and its sink.
pub struct Intake<M, S> {
    parser: Parser<M>,
    pub sink: S,
    stalled: bool,
    fault: Option<Fault>,
    /// Bytes taken, which distinguish a silent peer from a slow one.
    received: u64,
    changed: Arc<Notify>,
}

impl<M: Frame, S: MessageSink<M>> Intake<M, S> {
    pub fn fault(&self) -> Option<&Fault> {
        self.fault.as_ref()
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

    /// Takes bytes until they are used up or the intake stalls.
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
                self.stalled = !self.sink.begin(head, payload)?;
                if self.stalled {
                    self.changed.notify_one();
                }
            }
            Some(Event::Payload(mut slice)) => self.sink.put(&mut slice),
            Some(Event::End) => {
                if self.sink.end()? {
                    self.changed.notify_one();
                }
            }
        }
        Ok(true)
    }
}

/// An intake shared by the call's task and the connection's task.
pub struct SharedIntake<M, S> {
    intake: Arc<Mutex<Intake<M, S>>>,
    changed: Arc<Notify>,
}

impl<M, S> Clone for SharedIntake<M, S> {
    fn clone(&self) -> Self {
        SharedIntake { intake: Arc::clone(&self.intake), changed: Arc::clone(&self.changed) }
    }
}

impl<M: Frame, S: MessageSink<M>> SharedIntake<M, S> {
    pub fn new(sink: S) -> SharedIntake<M, S> {
        let changed = Arc::new(Notify::new());
        let intake = Intake {
            parser: Parser::new(),
            sink,
            stalled: false,
            fault: None,
            received: 0,
            changed: Arc::clone(&changed),
        };
        SharedIntake { intake: Arc::new(Mutex::new(intake)), changed }
    }

    pub fn lock(&self) -> MutexGuard<'_, Intake<M, S>> {
        self.intake.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes bytes that came through h2. After a stall the caller passes the rest again.
    pub fn take(&self, bytes: &mut Bytes) {
        self.lock().take(bytes);
    }

    /// Continues after a stall.
    pub fn go_on(&self) {
        let mut intake = self.lock();
        intake.stalled = false;
        // A message without a payload needs no further bytes, so its end is handled here.
        intake.take(&mut Bytes::new());
    }

    /// Waits for a fault, a stall, or a true result of [`MessageSink::end`].
    pub async fn changed(&self) {
        self.changed.notified().await;
    }
}

impl<M: Frame, S: MessageSink<M>> Sink for SharedIntake<M, S> {
    fn mode(&mut self) -> Mode {
        let mut intake = self.lock();
        let payload = intake.parser.payload_left();
        if intake.fault.is_some() {
            return Mode::Payload;
        }
        if intake.stalled {
            return Mode::Stalled;
        }
        if payload == 0 {
            return Mode::Fields;
        }
        match intake.sink.mode() {
            Mode::Direct(most) => Mode::Direct(payload.min(most)),
            mode => mode,
        }
    }

    fn put(&mut self, bytes: &mut Bytes) {
        self.take(bytes);
    }

    fn read(&mut self, most: usize, read: &mut Read<'_>) -> io::Result<usize> {
        let mut intake = self.lock();
        let count = intake.sink.read(most, read)?;
        intake.parser.skip(count);
        intake.received += count as u64;
        if intake.parser.payload_left() == 0 {
            intake.take(&mut Bytes::new());
        }
        Ok(count)
    }
}

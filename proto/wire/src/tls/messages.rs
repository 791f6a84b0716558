//! What records say beside data once hands are shaken: alerts, new keys, tickets.

use rustls::{AlertDescription, Error, InvalidMessage, PeerMisbehaved};

/// The types of messages that may come.
const NEW_SESSION_TICKET: u8 = 4;
const KEY_UPDATE: u8 = 24;
/// How many records without data may follow each other, how many new keys without data between them, and how many warnings
/// may come at all. rustls has the same numbers. Each costs this end more than its peer.
const EMPTY_MOST: u8 = 32;
const UPDATES_MOST: u8 = 32;
const WARNINGS_MOST: u8 = 4;

const WARNING: u8 = 1;
const FATAL: u8 = 2;

/// What was said.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Said {
    /// Nothing that this end does anything about.
    Nothing,
    /// The next record has a new key. With `answer` the other end wants one too.
    NewKey { answer: bool },
    /// Nothing more comes.
    Closed,
}

/// Follows what is said.
#[derive(Default)]
pub(super) struct Messages {
    /// The first bytes of a message that has not ended: its type and length.
    head: [u8; 4],
    have: usize,
    /// How many bytes of a ticket are still to come.
    skip: usize,
    empty: u8,
    updates: u8,
    warnings: u8,
}

impl Messages {
    /// A record with so many bytes of data has come.
    pub(super) fn data(&mut self, bytes: usize) -> Result<(), Error> {
        self.between()?;
        if bytes > 0 {
            (self.empty, self.updates) = (0, 0);
            return Ok(());
        }
        self.empty += 1;
        if self.empty > EMPTY_MOST { Err(PeerMisbehaved::TooManyEmptyFragments.into()) } else { Ok(()) }
    }

    /// A message is not interrupted by records of other types.
    fn between(&self) -> Result<(), Error> {
        let inside = self.have > 0 || self.skip > 0;
        if inside { Err(PeerMisbehaved::MessageInterleavedWithHandshakeMessage.into()) } else { Ok(()) }
    }

    pub(super) fn alert(&mut self, record: &[u8]) -> Result<Said, Error> {
        self.between()?;
        let &[level, description] = record else {
            return Err(InvalidMessage::TrailingData("AlertMessagePayload").into());
        };
        let description = AlertDescription::from(description);
        match (level, description) {
            (WARNING | FATAL, AlertDescription::CloseNotify) => Ok(Said::Closed),
            (WARNING, AlertDescription::UserCanceled) => {
                self.warnings += 1;
                let too_many = self.warnings > WARNINGS_MOST;
                if too_many {
                    Err(PeerMisbehaved::TooManyWarningAlertsReceived.into())
                } else {
                    Ok(Said::Nothing)
                }
            }
            _ => Err(Error::AlertReceived(description)),
        }
    }

    /// A record with messages, or parts of them. `tickets` says whether they may be tickets, as a client gets them. No session is
    /// resumed, so that they are skipped.
    pub(super) fn handshake(&mut self, record: &[u8], tickets: bool) -> Result<Said, Error> {
        if record.is_empty() {
            return Err(InvalidMessage::InvalidEmptyPayload.into());
        }
        let mut rest = record;
        while !rest.is_empty() {
            if self.skip > 0 {
                let now = self.skip.min(rest.len());
                self.skip -= now;
                rest = &rest[now..];
                continue;
            }
            if self.have < self.head.len() {
                self.head[self.have] = rest[0];
                self.have += 1;
                rest = &rest[1..];
                if self.have == self.head.len() {
                    self.begin(tickets)?;
                }
                continue;
            }
            // The one byte of a message about a key.
            let &[request] = rest else {
                return Err(PeerMisbehaved::KeyEpochWithPendingFragment.into());
            };
            return self.new_key(request);
        }
        Ok(Said::Nothing)
    }

    fn begin(&mut self, tickets: bool) -> Result<(), Error> {
        let [kind, high, middle, low] = self.head;
        let len = u32::from_be_bytes([0, high, middle, low]) as usize;
        match (kind, len) {
            (KEY_UPDATE, 1) => Ok(()),
            (KEY_UPDATE, _) => Err(InvalidMessage::InvalidKeyUpdate.into()),
            (NEW_SESSION_TICKET, 1..=0xFFFF) if tickets => {
                (self.have, self.skip) = (0, len);
                Ok(())
            }
            (NEW_SESSION_TICKET, _) if tickets => Err(InvalidMessage::HandshakePayloadTooLarge.into()),
            _ => Err(InvalidMessage::UnexpectedMessage("a message of a handshake that is over").into()),
        }
    }

    fn new_key(&mut self, request: u8) -> Result<Said, Error> {
        self.have = 0;
        self.updates += 1;
        if self.updates > UPDATES_MOST {
            return Err(PeerMisbehaved::TooManyKeyUpdateRequests.into());
        }
        match request {
            0 | 1 => Ok(Said::NewKey { answer: request == 1 }),
            _ => Err(InvalidMessage::InvalidKeyUpdate.into()),
        }
    }
}

/// What the other end is told before the connection ends with this error. None where it said so itself.
pub(super) fn alert_for(error: &Error) -> Option<AlertDescription> {
    Some(match error {
        Error::AlertReceived(_) => return None,
        Error::DecryptError => AlertDescription::BadRecordMac,
        Error::PeerSentOversizedRecord => AlertDescription::RecordOverflow,
        Error::InvalidMessage(InvalidMessage::UnexpectedMessage(_) | InvalidMessage::InvalidContentType)
        | Error::PeerMisbehaved(_) => AlertDescription::UnexpectedMessage,
        Error::InvalidMessage(InvalidMessage::InvalidKeyUpdate) => AlertDescription::IllegalParameter,
        Error::InvalidMessage(_) => AlertDescription::DecodeError,
        _ => AlertDescription::InternalError,
    })
}

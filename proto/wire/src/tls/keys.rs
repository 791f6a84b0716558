//! What records are sealed and opened with once hands are shaken: a key for each direction, and their updates.
//!
//! rustls' own sealer takes 16 KiB from the allocator for each record. A push seals so many that the allocator gave their pages back to
//! the kernel again and again, which took a fifth of its time; so records are sealed by ring here, one behind the other in a
//! buffer that is used again.

use ring::aead::{AES_128_GCM, AES_256_GCM, Aad, CHACHA20_POLY1305, LessSafeKey, Nonce, UnboundKey};
use rustls::{
    ConnectionTrafficSecrets, ContentType, Error, ExtractedSecrets, ProtocolVersion, Tls13CipherSuite,
    client::ClientConnectionData,
    crypto::cipher::{self, InboundOpaqueMessage, Iv, MessageDecrypter, OutboundChunks},
    kernel::KernelConnection,
    server::ServerConnectionData,
};

/// How many records one key seals at most, whatever its cipher allows. It is far from where their numbers would repeat.
const MOST_RECORDS: u64 = 1 << 60;

/// What makes the next keys.
pub(super) enum Schedule {
    Client(Box<KernelConnection<ClientConnectionData>>),
    Server(Box<KernelConnection<ServerConnectionData>>),
}

/// The keys of both directions. Each record has the next number of its direction and key, and none is used twice.
pub(super) struct Keys {
    schedule: Schedule,
    suite: &'static Tls13CipherSuite,
    sealing: Sealing,
    opening: (Box<dyn MessageDecrypter>, u64),
    /// How many records a key seals before the last one, which says that the next key takes its place.
    pub(super) most: u64,
}

struct Sealing {
    key: LessSafeKey,
    iv: Iv,
    /// The number of the next record.
    next: u64,
}

/// A message that says that this end's next record has a new key. It asks for none in return.
const KEY_UPDATE: [u8; 5] = [24, 0, 0, 1, 0];

impl Keys {
    /// # Errors
    /// Where it is not TLS 1.3.
    pub(super) fn new(secrets: ExtractedSecrets, schedule: Schedule) -> Result<Keys, Error> {
        let suite = match &schedule {
            Schedule::Client(of) => of.negotiated_cipher_suite(),
            Schedule::Server(of) => of.negotiated_cipher_suite(),
        };
        let suite = suite.tls13().ok_or(Error::HandshakeNotComplete)?;
        let sealing = Sealing::new(secrets.tx)?;
        let opening = opening(suite, secrets.rx)?;
        let most = suite.common.confidentiality_limit.min(MOST_RECORDS);
        Ok(Keys { schedule, suite, sealing, opening, most })
    }

    pub(super) fn is_client(&self) -> bool {
        matches!(self.schedule, Schedule::Client(_))
    }

    /// Opens a record in place, from its first byte on. Returns what it is and how many bytes it has.
    ///
    /// # Errors
    /// Where the other end has not sealed it so, as the next one.
    pub(super) fn open(&mut self, record: &mut [u8]) -> Result<(ContentType, usize), Error> {
        let sealed =
            InboundOpaqueMessage::new(ContentType::ApplicationData, ProtocolVersion::TLSv1_2, record);
        let (opener, number) = &mut self.opening;
        let opened = opener.decrypt(sealed, *number)?;
        *number += 1;
        Ok((opened.typ, opened.payload.len()))
    }

    /// Adds a record with this content to `records`, and before it the record of a new key where the old one has sealed enough.
    ///
    /// # Errors
    /// Where it cannot be sealed. Nothing more may be sent then.
    pub(super) fn seal(
        &mut self,
        kind: ContentType,
        payload: &OutboundChunks<'_>,
        records: &mut Vec<u8>,
    ) -> Result<(), Error> {
        if self.sealing.next >= self.most {
            self.update_sealing(records)?;
        }
        self.sealing.seal(kind, payload, records)
    }

    /// Says that this end's next record has a new key, with the old one, and takes the new one.
    pub(super) fn update_sealing(&mut self, records: &mut Vec<u8>) -> Result<(), Error> {
        self.sealing.seal(ContentType::Handshake, &OutboundChunks::Single(&KEY_UPDATE), records)?;
        self.take_next_sealing()
    }

    pub(super) fn take_next_sealing(&mut self) -> Result<(), Error> {
        let secrets = match &mut self.schedule {
            Schedule::Client(of) => of.update_tx_secret()?,
            Schedule::Server(of) => of.update_tx_secret()?,
        };
        self.sealing = Sealing::new(secrets)?;
        Ok(())
    }

    /// The other end has said that its next record has a new key.
    pub(super) fn update_opening(&mut self) -> Result<(), Error> {
        let secrets = match &mut self.schedule {
            Schedule::Client(of) => of.update_rx_secret()?,
            Schedule::Server(of) => of.update_rx_secret()?,
        };
        self.opening = opening(self.suite, secrets)?;
        Ok(())
    }
}

type Secrets = (u64, ConnectionTrafficSecrets);

impl Sealing {
    fn new((next, secrets): Secrets) -> Result<Sealing, Error> {
        let (algorithm, key, iv) = match secrets {
            ConnectionTrafficSecrets::Aes128Gcm { key, iv } => (&AES_128_GCM, key, iv),
            ConnectionTrafficSecrets::Aes256Gcm { key, iv } => (&AES_256_GCM, key, iv),
            ConnectionTrafficSecrets::Chacha20Poly1305 { key, iv } => (&CHACHA20_POLY1305, key, iv),
            _ => return Err(unknown()),
        };
        let key = UnboundKey::new(algorithm, key.as_ref()).map_err(|_| unknown())?;
        Ok(Sealing { key: LessSafeKey::new(key), iv, next })
    }

    /// Adds a record (RFC 8446, 5.2): its header, the content and its type, sealed, and the tag.
    fn seal(
        &mut self,
        kind: ContentType,
        payload: &OutboundChunks<'_>,
        records: &mut Vec<u8>,
    ) -> Result<(), Error> {
        let header = cipher::make_tls13_aad(payload.len() + 1 + self.key.algorithm().tag_len());
        records.extend_from_slice(&header);
        let from = records.len();
        payload.copy_to_vec(records);
        records.push(kind.into());
        let nonce = Nonce::assume_unique_for_key(cipher::Nonce::new(&self.iv, self.next).0);
        // A number whose sealing has failed is not used again either.
        self.next += 1;
        let sealed = self.key.seal_in_place_separate_tag(nonce, Aad::from(header), &mut records[from..]);
        let Ok(tag) = sealed else {
            // What is not sealed is not sent.
            records.truncate(from - header.len());
            return Err(Error::EncryptError);
        };
        records.extend_from_slice(tag.as_ref());
        Ok(())
    }
}

fn opening(
    suite: &Tls13CipherSuite,
    (number, secrets): Secrets,
) -> Result<(Box<dyn MessageDecrypter>, u64), Error> {
    let (key, iv) = match secrets {
        ConnectionTrafficSecrets::Aes128Gcm { key, iv }
        | ConnectionTrafficSecrets::Aes256Gcm { key, iv }
        | ConnectionTrafficSecrets::Chacha20Poly1305 { key, iv } => (key, iv),
        _ => return Err(unknown()),
    };
    Ok((suite.aead_alg.decrypter(key, iv), number))
}

fn unknown() -> Error {
    Error::General("a cipher that Longshore does not know".into())
}

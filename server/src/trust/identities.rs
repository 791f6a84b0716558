//! Identities that may call a server, with roles and jobs: the file `identities.toml` of the TLS folder.

use std::{collections::HashSet, fmt, sync::Arc};

use longshore_proto::{Fault, FaultKind};
use longshore_wire::direct::Certificate;
use ring::digest::{SHA256, digest};
use serde::{Deserialize, de::IgnoredAny};
use subtle::{Choice, ConditionallySelectable, ConstantTimeEq};

use crate::{
    config::{ByteSize, retired::IDLE_LIMIT},
    quota::Quota,
};

/// The file. Reading it gives no access, since it contains only SHA-256 hashes of tokens.
///
/// ```toml
/// revoked_sha256 = ["9f86d0..."]  # of certificates and tokens that show no identity any more; may be left out
///
/// [[identity]]
/// name = "trainer"             # also the first DNS name of its certificate
/// roles = ["worker"]           # operator, worker, reader: one or several
/// jobs = ["gpt-*", "probe"]    # names of jobs; * stands for any characters, ? for one
/// tokens_sha256 = ["2c26b4..."]  # of tokens that show this identity instead of a certificate; may be left out
/// quota = { jobs = 4, memory = "64GiB", drives = "1TiB", connections = 64 }   # each may be left out
/// ```
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    #[serde(default)]
    revoked_sha256: Vec<String>,
    #[serde(default)]
    identity: Vec<Entry>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    name: String,
    roles: Vec<Role>,
    jobs: Vec<String>,
    #[serde(default)]
    tokens_sha256: Vec<String>,
    #[serde(default)]
    quota: Most,
    /// Retired, like `share`: see [`Entry::check_retired`].
    idle_limit: Option<IgnoredAny>,
    share: Option<IgnoredAny>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct Most {
    jobs: Option<u64>,
    memory: Option<ByteSize>,
    drives: Option<ByteSize>,
    connections: Option<u64>,
}

/// Permission of an identity on its jobs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Role {
    /// Deletes, pauses, resumes, restores, writes checkpoints, drains.
    Operator,
    /// Trains.
    Worker,
    /// Looks, pulls and exports weights.
    Reader,
}

/// A listed identity.
#[derive(Debug)]
pub(super) struct Identity {
    pub(super) name: String,
    pub(super) roles: Vec<Role>,
    jobs: Vec<String>,
    pub(super) quota: Quota,
}

/// Proof of identity that a caller has shown.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Credential {
    /// The certificate's name is the identity's.
    Certificate(Arc<Certificate>),
    /// Hash of a token.
    Token(Sha256),
}

pub(super) type Sha256 = [u8; 32];

/// Content of the file.
#[derive(Debug)]
pub(super) struct Identities {
    identities: Vec<Identity>,
    /// Hashes of tokens, with the index of their identity.
    tokens: Vec<(Sha256, u32)>,
    /// Hashes of certificates and tokens that show no identity any more.
    revoked: HashSet<Sha256>,
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Role::Operator => "operator",
            Role::Worker => "worker",
            Role::Reader => "reader",
        })
    }
}

impl Identity {
    pub(super) fn has_job(&self, job: &str) -> bool {
        self.jobs.iter().any(|pattern| is_match(pattern.as_bytes(), job.as_bytes()))
    }

    pub(super) fn has_all_jobs(&self) -> bool {
        self.jobs.iter().any(|pattern| pattern == "*")
    }

    pub(super) fn has_one_of(&self, roles: &[Role]) -> bool {
        self.roles.iter().any(|role| roles.contains(role))
    }

    pub(super) fn jobs(&self) -> String {
        self.jobs.join(", ")
    }
}

impl Entry {
    /// Refuses keys of release 0.1, and names the replacement of each.
    fn check_retired(&self) -> Result<(), Fault> {
        let retired = [
            ("idle_limit", &self.idle_limit, IDLE_LIMIT),
            ("share", &self.share, "leave it out: jobs take turns on the update threads"),
        ];
        match retired.into_iter().find(|(_, value, _)| value.is_some()) {
            Some((key, _, remedy)) => {
                Err(Fault { remedy: remedy.into(), ..wrong(key, format!("of {}: a retired key", self.name)) })
            }
            None => Ok(()),
        }
    }
}

impl From<Most> for Quota {
    fn from(most: Most) -> Quota {
        let Most { jobs, memory, drives, connections } = most;
        let bytes = |size: Option<ByteSize>| size.map(|size| size.0);
        Quota { jobs, memory: bytes(memory), drives: bytes(drives), connections }
    }
}

impl Identities {
    /// Parses the file.
    ///
    /// # Errors
    /// If the file is malformed, or has invalid names, hashes or patterns.
    pub(super) fn parse(text: &str) -> Result<Identities, Fault> {
        let file: File = toml::from_str(text).map_err(|error| wrong("the file", error.message()))?;
        let (mut identities, mut tokens) = (Vec::<Identity>::new(), Vec::new());
        let hash = |text: String| {
            // openssl prints colons between the digits.
            let value = || format!("{text:?}, not 64 hexadecimal digits");
            parse_hash(&text.replace(':', "")).ok_or_else(|| wrong("revoked_sha256", value()))
        };
        let revoked = file.revoked_sha256.into_iter().map(hash).collect::<Result<_, Fault>>()?;
        for entry in file.identity {
            entry.check_retired()?;
            let Entry { name, roles, jobs, tokens_sha256, quota, .. } = entry;
            if name.is_empty() || identities.iter().any(|known| known.name == name) {
                return Err(wrong("name", format!("{name:?}, which is empty or there twice")));
            }
            if roles.is_empty() || jobs.is_empty() {
                return Err(wrong("roles, jobs", format!("of {name}: none, so that it may do nothing")));
            }
            for hash in tokens_sha256 {
                let hash = parse_hash(&hash).ok_or_else(|| {
                    wrong("tokens_sha256", format!("{hash:?} of {name}, not 64 hexadecimal digits"))
                })?;
                if tokens.iter().any(|(known, _)| *known == hash) {
                    return Err(wrong("tokens_sha256", format!("of {name}: a token that is there twice")));
                }
                tokens.push((hash, identities.len() as u32));
            }
            identities.push(Identity { name, roles, jobs, quota: quota.into() });
        }
        Ok(Identities { identities, tokens, revoked })
    }

    pub(super) fn has_tokens(&self) -> bool {
        !self.tokens.is_empty()
    }

    pub(super) fn all(&self) -> &[Identity] {
        &self.identities
    }

    pub(super) fn named(&self, name: &str) -> Option<&Identity> {
        self.identities.iter().find(|identity| identity.name == name)
    }

    pub(super) fn is_revoked(&self, credential: &Credential) -> bool {
        self.revoked.contains(match credential {
            Credential::Certificate(certificate) => &certificate.sha256,
            Credential::Token(hash) => hash,
        })
    }

    /// Returns the identity that the credential shows. None if no identity is listed for the credential, or if the
    /// credential is revoked.
    pub(super) fn find(&self, credential: &Credential) -> Option<&Identity> {
        match credential {
            _ if self.is_revoked(credential) => None,
            Credential::Certificate(certificate) => self.named(&certificate.name),
            Credential::Token(hash) => self.identities.get(self.owner(hash)? as usize),
        }
    }

    /// Returns the index of the token's identity. All hashes are compared, each in constant time, so timing reveals no
    /// match.
    fn owner(&self, hash: &Sha256) -> Option<u32> {
        let (mut owner, mut found) = (0, Choice::from(0));
        for (known, whose) in &self.tokens {
            let same = known.ct_eq(hash);
            owner.conditional_assign(whose, same);
            found |= same;
        }
        bool::from(found).then_some(owner)
    }
}

impl Credential {
    pub(super) fn of_token(token: &[u8]) -> Credential {
        let mut hash = [0; 32];
        hash.copy_from_slice(digest(&SHA256, token).as_ref());
        Credential::Token(hash)
    }
}

fn wrong(field: &str, value: impl fmt::Display) -> Fault {
    let limit = "as docs/secure.md describes it";
    Fault::new(FaultKind::Invalid, format!("identities.toml, {field}"), value, limit, "correct it")
}

fn parse_hash(text: &str) -> Option<Sha256> {
    let digits = text.as_bytes();
    if digits.len() != 64 || !digits.iter().all(u8::is_ascii_hexdigit) {
        return None;
    }
    let mut hash = [0; 32];
    for (byte, pair) in hash.iter_mut().zip(text.as_bytes().chunks(2)) {
        *byte = u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok()?;
    }
    Some(hash)
}

/// Returns whether a name matches a pattern, in which `*` stands for any characters and `?` for one.
fn is_match(pattern: &[u8], name: &[u8]) -> bool {
    let (mut at, mut of) = (0, 0);
    // Index of the last star in the pattern, and of the name's first byte behind the star's match.
    let mut star = None;
    while of < name.len() {
        match pattern.get(at) {
            Some(b'*') => {
                star = Some((at, of));
                at += 1;
            }
            Some(&now) if now == b'?' || now == name[of] => (at, of) = (at + 1, of + 1),
            _ => {
                let Some((before, taken)) = star else { return false };
                star = Some((before, taken + 1));
                (at, of) = (before + 1, taken + 1);
            }
        }
    }
    pattern[at..].iter().all(|&rest| rest == b'*')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_cannot_be_meant_is_refused() {
        let entry = |rest: &str| format!("[[identity]]\nname = \"a\"\n{rest}");
        for (text, about) in [
            (entry("roles = [\"admin\"]\njobs = [\"*\"]"), "unknown variant"),
            (entry("roles = [\"worker\"]\njobs = []"), "none"),
            (entry("roles = [\"worker\"]\njobs = [\"*\"]\ntoken = \"foo\""), "unknown field"),
            (entry("roles = [\"worker\"]\njobs = [\"*\"]\ntokens_sha256 = [\"2c26\"]"), "64 hexadecimal"),
            (entry("roles = [\"reader\"]\njobs = [\"*\"]\n").repeat(2), "there twice"),
            (entry("roles = [\"worker\"]\njobs = [\"*\"]\nquota = { job = 1 }"), "unknown field"),
            (entry("roles = [\"worker\"]\njobs = [\"*\"]\nquota = { memory = \"lots\" }"), "is not a size"),
            (entry("roles = [\"worker\"]\njobs = [\"*\"]\nshare = 2"), "take turns"),
            (entry("roles = [\"worker\"]\njobs = [\"*\"]\nidle_limit = \"never\""), "longshore checkpoint"),
            ("revoked_sha256 = [\"AB\"]".into(), "64 hexadecimal"),
            ("[[identity]]\nname = \"\"\nroles = [\"reader\"]\njobs = [\"*\"]".into(), "empty"),
        ] {
            let said = Identities::parse(&text).unwrap_err().to_string();
            assert!(said.contains(about) && said.contains("identities.toml"), "{said}");
        }
        assert!(Identities::parse("").unwrap().identities.is_empty());
    }

    #[test]
    fn patterns() {
        for (pattern, name) in
            [("*", ""), ("*", "a"), ("a*c", "abbc"), ("a*c", "ac"), ("?b*", "ab"), ("*-*-x", "a-b-c-x")]
        {
            assert!(is_match(pattern.as_bytes(), name.as_bytes()), "{pattern} {name}");
        }
        for (pattern, name) in [("", "a"), ("a", ""), ("a*c", "abcd"), ("?", ""), ("a", "A"), ("a?", "abc")] {
            assert!(!is_match(pattern.as_bytes(), name.as_bytes()), "{pattern} {name}");
        }
        // A pattern of many stars takes at most as many comparisons as pattern length times name length.
        assert!(!is_match(&b"a*".repeat(60), &[b"a".repeat(120), b"b".to_vec()].concat()[..59]));
    }
}

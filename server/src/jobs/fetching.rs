//! Fetches of shards that other servers hand over to this server. A task of the job fetches the shards, and ends once
//! no shard is awaited. The next decision that brings shards starts another task.

use std::{
    collections::BTreeMap,
    future::pending,
    path::Path,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use futures_util::future::{join_all, try_join_all};
use longshore_engine::{
    job::{IMAGE, OLDER_IMAGE},
    step::Awaited,
};
use longshore_proto::{
    Fault, FaultKind, JobName, Placement, ServerId,
    checksum::crc32,
    limits::{CHUNK_BYTES, CHUNK_HEADROOM_BYTES, DEFAULT_DEADLINE_MS},
};
use longshore_wire::{
    Channel, dial, fault_from_status,
    tls::Credentials,
    v1::{DescribeRequest, FetchRequest, admin_client::AdminClient, tensors_client::TensorsClient},
};
use tokio::time::{Instant, sleep, timeout};

use super::JobHandle;
use crate::{lock::lock, tasks::blocking};

/// Number of shards that are fetched at once: while one shard is written, the next is on its way.
const AT_ONCE: usize = 2;
/// Pause after the first failed fetch. Pauses after further failures grow to [`LONGEST_PAUSE`].
const PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(2);
/// The longest silence of a server that sends a shard, once the shard's version is made.
const SILENCE: Duration = Duration::from_secs(20);
/// Longest wait for each member of a job before the job is opened here.
const REACH: Duration = Duration::from_secs(5);

/// Largest number of characters kept of an obstacle: the text on why rank 0 cannot move shards.
const MOST_SAID: usize = 1000;

/// Fetches of one job.
#[derive(Default)]
pub(crate) struct Fetching {
    is_running: AtomicBool,
    fetched: Mutex<Fetched>,
}

/// Shards and bytes that were fetched since the job was opened here.
#[derive(Clone, Debug, Default)]
pub(crate) struct Fetched {
    pub(crate) shards: u64,
    pub(crate) bytes: u64,
    /// Time that updates waited for a shard.
    pub(crate) held: Duration,
    /// Fault of the newest failed fetch. None once a later fetch has succeeded.
    pub(crate) failure: Option<Fault>,
    /// Why rank 0 cannot move shards as an operator wants. Empty: nothing is in the way.
    pub(crate) obstacle: String,
    /// Request time of the newest wish that rank 0 has fulfilled.
    pub(crate) reached_micros: u64,
}

/// A shard that has arrived.
struct Received {
    bytes: u64,
    /// The image of the version before came too.
    has_older: bool,
    /// Time at which an update began to wait for the shard.
    held_since: Option<Instant>,
}

impl Fetching {
    pub(crate) fn fetched(&self) -> Fetched {
        lock(&self.fetched).clone()
    }

    pub(crate) fn note_report(&self, obstacle: &str, reached_micros: u64) {
        let mut fetched = lock(&self.fetched);
        fetched.reached_micros = fetched.reached_micros.max(reached_micros);
        if fetched.obstacle != obstacle {
            fetched.obstacle = obstacle.chars().take(MOST_SAID).collect();
        }
    }
}

impl JobHandle {
    /// Starts to fetch the shards that the job awaits, unless a task does so already. `tls_dir` has this server's
    /// certificate, with which it calls other servers.
    pub(crate) fn fetch_awaited(self: &Arc<Self>, tls_dir: Option<&Path>) {
        if self.job.awaited().is_empty() || self.fetching.is_running.swap(true, Ordering::AcqRel) {
            return;
        }
        let (handle, tls_dir) = (Arc::clone(self), tls_dir.map(Path::to_path_buf));
        tokio::spawn(async move {
            let mut closing = handle.closing();
            tokio::select! {
                biased;
                // A closed job ends the fetch. A step back waits for the job's users, and a fetch may wait for a server
                // that steps back too.
                _ = closing.wait_for(Option::is_some) => {}
                () = handle.fetch_all(tls_dir.as_deref()) => {}
            }
            handle.fetching.is_running.store(false, Ordering::Release);
            // A decision may have brought shards since the last look.
            if !handle.is_closed() && handle.job.protocol.check_alive().is_ok() {
                handle.fetch_awaited(tls_dir.as_deref());
            }
        });
    }

    async fn fetch_all(&self, tls_dir: Option<&Path>) {
        let (mut channels, mut pause) = (BTreeMap::new(), PAUSE);
        loop {
            let awaited = self.job.awaited();
            if awaited.is_empty() || self.job.protocol.check_alive().is_err() {
                return;
            }
            // A shard of a later version may have to wait for a shard of this version. So only shards of one version
            // are fetched together.
            let count = awaited.iter().take_while(|of| of.version == awaited[0].version).count();
            let first = &awaited[..count.min(AT_ONCE)];
            for shard in first {
                if !channels.contains_key(&shard.address) {
                    match channel(&shard.address, tls_dir).await {
                        Ok(channel) => drop(channels.insert(shard.address.clone(), channel)),
                        Err(fault) => self.note_failure(shard, fault),
                    }
                }
            }
            let fetches = first.iter().filter_map(|shard| {
                let channel = channels.get(&shard.address)?.clone();
                Some(async move { self.fetch(shard, channel).await.map_err(|fault| (shard, fault)) })
            });
            let ended = join_all(fetches).await;
            let is_whole = ended.len() == first.len() && ended.iter().all(Result::is_ok);
            for (shard, fault) in ended.into_iter().filter_map(Result::err) {
                channels.remove(&shard.address);
                self.note_failure(shard, fault);
            }
            match is_whole {
                true => pause = PAUSE,
                false => {
                    sleep(pause).await;
                    pause = (2 * pause).min(LONGEST_PAUSE);
                }
            }
        }
    }

    /// Waits until a decision takes an awaited shard away, or an operator names the shard's source as lost.
    async fn until_given_up(&self, awaited: &Awaited) {
        let mut changed = self.changed.clone();
        if changed.wait_for(|_| !self.job.awaits(awaited)).await.is_err() {
            pending::<()>().await;
        }
    }

    async fn fetch(&self, awaited: &Awaited, channel: Channel) -> Result<(), Fault> {
        let request = FetchRequest {
            job: self.job.spec().name.to_string(),
            shard: awaited.shard.0,
            version: awaited.version.0,
            deadline_ms: DEFAULT_DEADLINE_MS,
            ..FetchRequest::default()
        };
        let mut client =
            TensorsClient::new(channel).max_decoding_message_size(CHUNK_BYTES + CHUNK_HEADROOM_BYTES);
        let Received { bytes, has_older, held_since } = tokio::select! {
            received = self.receive(awaited, &mut client, request.clone()) => received?,
            () = self.until_given_up(awaited) => return Err(silent(awaited)),
        };
        let (job, of) = (Arc::clone(&self.job), awaited.clone());
        let works = blocking(move || job.fetched(&of, has_older)).await?;
        {
            let mut fetched = lock(&self.fetching.fetched);
            (fetched.shards, fetched.bytes) = (fetched.shards + 1, fetched.bytes + bytes);
            fetched.failure = None;
            if !works.is_empty() {
                fetched.held += held_since.map_or(Duration::ZERO, |since| since.elapsed());
            }
        }
        tracing::debug!(job = %self.job.spec().name, shard = awaited.shard.0, version = awaited.version.0, "fetched");
        self.perform(works);
        if awaited.is_replica {
            self.say_arrived(&mut client, request, awaited).await;
        }
        Ok(())
    }

    /// Writes an awaited shard where its updates will be.
    async fn receive(
        &self,
        awaited: &Awaited,
        client: &mut TensorsClient<Channel>,
        request: FetchRequest,
    ) -> Result<Received, Fault> {
        let fault = |status| fault_from_status(&status, &awaited.address);
        let mut parts = client.fetch(request).await.map_err(fault)?.into_inner();
        let whole = self.job.handed_bytes(awaited.shard)?;
        let (mut missing, mut held_since) = (whole, None);
        let mut patience = Duration::from_millis(DEFAULT_DEADLINE_MS);
        loop {
            let next = timeout(patience, parts.message()).await.map_err(|_| silent(awaited))?;
            let Some(part) = next.map_err(fault)? else { break };
            patience = SILENCE;
            if crc32(&part.payload) != part.crc32 || part.payload.is_empty() {
                let remedy = "it is fetched again; if it repeats, suspect the network or a host's memory";
                let value = format!("{:08x} of {}", part.crc32, awaited.shard);
                return Err(Fault::new(FaultKind::Corrupt, "fetch.crc32", value, "the payload's", remedy));
            }
            if part.array >= IMAGE {
                self.until_image(awaited).await?;
            }
            self.job.write_fetched(awaited, part.array, part.offset as usize, &part.payload)?;
            if let Some(missing) = missing.get_mut(part.array as usize) {
                *missing = missing.saturating_sub(part.payload.len());
            }
            if self.job.is_held() {
                held_since.get_or_insert_with(Instant::now);
            }
        }
        // The source has no older image where the job has just begun.
        let older = OLDER_IMAGE as usize;
        let has_older = whole[older] > missing[older];
        missing[older] *= usize::from(has_older);
        let missing: usize = missing.iter().sum();
        if missing > 0 {
            return Err(short(awaited, missing));
        }
        self.until_image(awaited).await?;
        let bytes = whole[..older].iter().sum::<usize>() + usize::from(has_older) * whole[older];
        Ok(Received { bytes: bytes as u64, has_older, held_since })
    }

    /// Tells the owner that a new replica has a shard's state: the owner's updates wait for this message. Repeats the
    /// call until the owner answers, or has left the job. Further shards are fetched only afterwards.
    async fn say_arrived(
        &self,
        client: &mut TensorsClient<Channel>,
        request: FetchRequest,
        awaited: &Awaited,
    ) {
        let request = FetchRequest { arrived: true, ..request };
        let mut pause = PAUSE;
        loop {
            let fault = match timeout(SILENCE, client.fetch(request.clone())).await {
                Ok(Ok(_)) => return,
                Ok(Err(status)) => fault_from_status(&status, &awaited.address),
                Err(_) => silent(awaited),
            };
            let is_member = self.job.placement().members().any(|server| server == awaited.source);
            let is_lost = self.wanted().lost.contains(&awaited.source);
            if !is_member || is_lost || !matches!(fault.kind, FaultKind::Unavailable | FaultKind::Deadline) {
                return;
            }
            self.note_failure(awaited, fault);
            sleep(pause).await;
            pause = (2 * pause).min(LONGEST_PAUSE);
        }
    }

    /// Waits until the image of an awaited shard may be written.
    async fn until_image(&self, awaited: &Awaited) -> Result<(), Fault> {
        let deadline = Instant::now() + Duration::from_millis(DEFAULT_DEADLINE_MS);
        let late = || self.late("fetch", format!("{} of {}", awaited.version, awaited.shard));
        self.until(deadline, || self.job.check_image(awaited), late).await
    }

    fn note_failure(&self, awaited: &Awaited, fault: Fault) {
        let (job, shard, source) = (&self.job.spec().name, awaited.shard.0, &awaited.address);
        let mut fetched = lock(&self.fetching.fetched);
        if fetched.failure.replace(fault.clone()).is_none() {
            tracing::warn!(%job, shard, source, %fault, "a shard cannot be fetched yet; it is tried again");
        }
    }
}

async fn channel(address: &str, tls_dir: Option<&Path>) -> Result<Channel, Fault> {
    let tls_dir = tls_dir.filter(|_| !address.starts_with("unix:")).map(Path::to_path_buf);
    // The files may be on a network drive, so a blocking thread reads them.
    let credentials = blocking(move || tls_dir.as_deref().map(Credentials::read).transpose()).await?;
    dial::connect(address, credentials.as_ref()).await
}

/// Checks that this server reaches a job's other members by the addresses in `placement`, from which it will fetch.
///
/// Members without the job pass: rank 0 opens a job on several new servers at once.
///
/// # Errors
/// `Precondition` for a member that does not answer, or where another server answers, as on a loopback address.
pub(crate) async fn check_reached(
    job: &JobName,
    placement: &Placement,
    own: ServerId,
    tls_dir: Option<&Path>,
) -> Result<(), Fault> {
    let check = async |server: ServerId| {
        let address = placement.servers[server.0 as usize].as_str();
        let describe = async {
            let mut admin = AdminClient::new(channel(address, tls_dir).await?);
            let request = DescribeRequest { job: job.to_string(), brief: true, ..DescribeRequest::default() };
            let answer =
                admin.describe(request).await.map_err(|status| fault_from_status(&status, address))?;
            Ok(ServerId(answer.into_inner().server))
        };
        let cause = match timeout(REACH, describe).await {
            Ok(Ok(found)) if found == server => return Ok(()),
            Ok(Err(Fault { kind: FaultKind::NotFound, field, .. })) if field == "job" => return Ok(()),
            Ok(Ok(found)) => format!("{found} of the job answers"),
            Ok(Err(fault)) => fault.to_string(),
            Err(_) => format!("no answer within {} s", REACH.as_secs()),
        };
        let limit = format!("{server} of the job, reached from this new server too");
        let remedy = "open the job with addresses by which its servers reach each other, and see firewalls between them";
        let value = format!("{address} ({cause})");
        Err(Fault::new(FaultKind::Precondition, "placement.servers", value, limit, remedy))
    };
    try_join_all(placement.members().filter(|&server| server != own).map(check)).await?;
    Ok(())
}

fn silent(awaited: &Awaited) -> Fault {
    let remedy = "see the load of that server; the shard is asked for again";
    Fault::new(
        FaultKind::Deadline,
        "fetch",
        format!("{} from {}", awaited.shard, awaited.address),
        "sent in time",
        remedy,
    )
}

fn short(awaited: &Awaited, missing: usize) -> Fault {
    let value = format!("{missing} bytes of {} missing", awaited.shard);
    Fault::new(FaultKind::Unavailable, "fetch", value, "the whole shard", "it is asked for again")
}

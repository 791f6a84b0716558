//! Links between ranks and servers: messages are late, lost or sent twice, and streams break.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex},
    time::Duration,
};

use http::{Request, Response};
use http_body_util::BodyExt;
use longshore_wire::{Answer, Channel};
use tokio::sync::{mpsc, oneshot, watch};
use tonic::{Status, body::Body};

use crate::{
    grpc::body as body_of,
    host::{OUTSIDE, ProcessId, Sim, lock},
    server::Server,
};

/// Time after which a process notices a dead connection, as HTTP/2's pings do.
const SILENCE: Duration = Duration::from_secs(4);

/// Longest time until a call arrives that its caller has given up.
const STRAY: Duration = Duration::from_secs(1);

/// Calls that may arrive after their caller has given them up. A late one of these changes a server's state most.
const STRAYING: [&str; 3] = ["Join", "Commit", "StepBack"];

/// Faults of the messages between one rank and one server.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Weather {
    /// Requests of the rank do not arrive.
    pub(crate) is_cut_out: bool,
    /// Answers of the server do not arrive.
    pub(crate) is_cut_back: bool,
    pub(crate) delay: Duration,
    /// Number of times that the connection was broken.
    pub(crate) breaks: u32,
}

#[derive(Default)]
pub(crate) struct Network {
    servers: Mutex<BTreeMap<String, Arc<Server>>>,
    links: Mutex<BTreeMap<(ProcessId, String), watch::Sender<Weather>>>,
}

impl Network {
    /// Lets a server listen at its address, in place of an earlier process.
    pub(crate) fn listen(&self, address: &str, server: &Arc<Server>) {
        lock(&self.servers).insert(address.into(), Arc::clone(server));
    }

    pub(crate) fn server(&self, address: &str) -> Option<Arc<Server>> {
        lock(&self.servers).get(address).cloned()
    }

    fn link(&self, from: ProcessId, to: &str) -> watch::Receiver<Weather> {
        lock(&self.links).entry((from, to.into())).or_default().subscribe()
    }

    /// Changes the faults of the link from a process to a server.
    pub(crate) fn change(&self, from: ProcessId, to: &str, change: impl FnOnce(&mut Weather)) {
        lock(&self.links).entry((from, to.into())).or_default().send_modify(change);
    }

    pub(crate) fn clear(&self) {
        for link in lock(&self.links).values() {
            link.send_modify(|weather| *weather = Weather { breaks: weather.breaks, ..Weather::default() });
        }
    }
}

pub(crate) fn connect(sim: &Arc<Sim>, from: ProcessId, address: &str) -> Channel {
    let (sim, address) = (Arc::clone(sim), address.to_string());
    Channel::carried(move |request| carry(Arc::clone(&sim), from, address.clone(), request))
}

fn gone(why: &str) -> Box<dyn std::error::Error + Send + Sync> {
    Box::new(Status::unavailable(why))
}

fn carry(sim: Arc<Sim>, from: ProcessId, address: String, request: Request<Body>) -> Answer {
    Box::pin(async move {
        let link = sim.network.link(from, &address);
        travel(&sim, &link).await;
        if link.borrow().is_cut_out {
            sim.sleep(SILENCE).await;
            return Err(gone("no answer to pings"));
        }
        let server = sim.network.server(&address).filter(|server| !sim.is_dead(server.process));
        let Some(server) = server else { return Err(gone("connection refused")) };
        let to = server.process;
        let path = request.uri().path().rsplit('/').next().unwrap_or_default().to_string();
        let request = request.map(|body| relay(&sim, (from, to), &link, true, body));
        if STRAYING.contains(&&*path) && sim.one_in(sim.rates.stray) {
            // The kernel still sends the bytes of a connection after its process has given that up.
            let (carries, late) = (Arc::clone(&sim), sim.part_of(STRAY));
            sim.note(from, || format!("gives {path} to {address} up, which arrives {late:?} later"));
            sim.spawn(to, async move {
                carries.sleep(late).await;
                drop(server.answer(request).await);
            });
            return Err(gone("connection reset"));
        }
        let (sender, answer) = oneshot::channel();
        sim.spawn(to, async move { _ = sender.send(server.answer(request).await) });
        let mut breaks = link.clone();
        let before = breaks.borrow().breaks;
        let answer: Response<Body> = tokio::select! {
            biased;
            answer = answer => answer.map_err(|_| gone("the server died"))?,
            _ = breaks.wait_for(|weather| weather.breaks != before) => return Err(gone("connection reset")),
        };
        travel(&sim, &link).await;
        if link.borrow().is_cut_back {
            sim.sleep(SILENCE).await;
            return Err(gone("no answer to pings"));
        }
        if sim.one_in(sim.rates.lost) {
            sim.note(from, || format!("the answer to {path} of {address} is lost"));
            return Err(gone("connection reset"));
        }
        Ok(answer.map(|body| relay(&sim, (to, from), &link, false, body)))
    })
}

async fn travel(sim: &Arc<Sim>, link: &watch::Receiver<Weather>) {
    let delay = link.borrow().delay;
    if sim.one_in(sim.rates.late) {
        // As if the packet was lost and sent again.
        let late = sim.part_of(Duration::from_secs(2));
        sim.sleep(late).await;
    }
    let usual = if sim.one_in(20) { Duration::from_millis(20) } else { Duration::from_micros(400) };
    let time = delay + sim.part_of(usual);
    sim.sleep(time).await;
}

/// Carries a body from one process to another. The task belongs to the outside, so sent bytes arrive even after either
/// process's death.
fn relay(
    sim: &Arc<Sim>,
    (from, to): (ProcessId, ProcessId),
    link: &watch::Receiver<Weather>,
    is_out: bool,
    body: Body,
) -> Body {
    let (sender, frames) = mpsc::channel(4);
    let (sim, mut link) = (Arc::clone(sim), link.clone());
    let here = Arc::clone(&sim);
    let (mut died, mut other) = (sim.died(from), sim.died(to));
    here.spawn(OUTSIDE, async move {
        let mut body = body;
        let before = link.borrow().breaks;
        loop {
            let frame = tokio::select! {
                biased;
                frame = body.frame() => frame,
                () = sender.closed() => return,
                _ = died.wait_for(|died| *died) => Some(Err(Status::unavailable("its process died"))),
                _ = other.wait_for(|died| *died) => return,
                _ = link.wait_for(|weather| weather.breaks != before) => {
                    Some(Err(Status::unavailable("connection reset")))
                }
            };
            let Some(frame) = frame else {
                if sim.is_dead(from) {
                    _ = sender.send(Err(Status::unavailable("its process died"))).await;
                }
                return;
            };
            let is_over = frame.is_err();
            travel(&sim, &link).await;
            let is_cut = if is_out { link.borrow().is_cut_out } else { link.borrow().is_cut_back };
            let frame = if is_cut || link.borrow().breaks != before {
                sim.sleep(if is_cut { SILENCE } else { Duration::ZERO }).await;
                Err(Status::unavailable("connection lost"))
            } else {
                frame
            };
            let is_over = is_over || frame.is_err();
            if sender.send(frame).await.is_err() || is_over {
                return;
            }
        }
    });
    body_of(frames)
}

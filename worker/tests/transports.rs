//! Equal bits over every transport, with any number of connections.

use std::{
    thread,
    time::{Duration, Instant},
};

use longshore_proto::{Hyper, JobName, JobSpec, Rank, Step};
use longshore_server::Config;
use longshore_worker::{LossScaler, Options, Pipeline, PipelineOptions, Result, Session, Transport};

use crate::{config, params, serve};

const STEPS: u64 = 3;
const WORLD: u32 = 2;
const SIZES: [u64; 4] = [700_001, 64, 1_300_000, 5];

fn spec(job: &str) -> JobSpec {
    JobSpec {
        world_size: WORLD,
        micro_steps: 2,
        shard_elements: 10 * 65536,
        ..JobSpec::new(JobName::parse("job", job).unwrap(), params(&SIZES))
    }
}

fn numbers(seed: u64, elements: u64) -> Vec<f32> {
    let mix =
        |index: u64| (index + 1).wrapping_mul(seed.wrapping_mul(2) | 1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    (0..elements).map(|index| (mix(index) >> 40) as f32 / (1u64 << 24) as f32 - 0.5).collect()
}

/// Trains one rank to the end. Returns its last weights, the state hash, and the transport that the server
/// reports.
fn train(
    address: String,
    job: &str,
    rank: u32,
    connections: usize,
    transport: Transport,
) -> Result<(Vec<f32>, String, String)> {
    let mut options = Options::new(vec![address], spec(job), Rank(rank));
    options.connections = connections;
    options.transport = transport;
    options.deadline = Duration::from_secs(30);
    let mut session = Session::connect(options)?;
    let joined = session.start(&|param| numbers(param as u64, SIZES[param]))?;
    let hyper = Hyper { lr: 1e-2, beta1: 0.9, beta2: 0.99, eps: 1e-8, weight_decay: 0.1, ..Hyper::default() };
    let options = PipelineOptions::new(LossScaler::fixed(1.0)?, move |_: Step| vec![hyper]);
    let mut pipeline = Pipeline::new(session, &joined, options)?;
    let (mut weights, mut first) = (Vec::new(), None);
    for step in 0..=STEPS {
        pipeline.begin()?;
        let feed = pipeline.weights()?;
        let layout = spec(job).validate()?;
        weights = vec![0.0; layout.elements() as usize];
        feed.read(0..layout.elements(), &mut weights)?;
        first.get_or_insert_with(|| feed.clone());
        if step == STEPS {
            break;
        }
        for micro_step in 0..2u32 {
            let mut assembler = pipeline.assembler(micro_step)?;
            for (param, &size) in SIZES.iter().enumerate().rev() {
                let seed = step * 1000 + u64::from(micro_step * 100 + rank * 10) + param as u64;
                assembler.put(param, &numbers(seed, size))?;
            }
            assembler.finish()?;
        }
        drop(feed);
        pipeline.finish(Vec::new())?;
    }
    let hash = pipeline.session().state_hash()?.hash;
    let server = pipeline.session().describe()?.remove(0);
    let transport = server.ranks[rank as usize].transport.clone();
    // After two more versions, weights that were copied can still be read. A read of weights in the server's memory
    // fails, since they are gone.
    let mut late = vec![0.0; 64];
    let late = first.map(|feed| feed.read(0..64, &mut late));
    assert_eq!(late.is_some_and(|read| read.is_err()), transport == "memfd");
    Ok((weights, hash, transport))
}

#[test]
fn every_transport_and_all_at_once_give_the_same_bits() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("longshored.sock");
    let unix = format!("unix:{}", socket.display());
    let (server, runtime) = serve(Config { listen_unix: Some(socket), ..config() });
    let tcp = server.address().to_string();
    use Transport::{Auto, Memfd, Tcp, Unix};
    let runs = [
        ("tcp-1", [(&tcp, Tcp); 2], 1),
        ("tcp-4", [(&tcp, Tcp); 2], 4),
        ("unix-2", [(&unix, Unix); 2], 2),
        ("memfd-1", [(&tcp, Memfd), (&unix, Memfd)], 1),
        ("mixed-3", [(&unix, Unix), (&tcp, Auto)], 3),
    ];
    let mut results = Vec::new();
    for (job, ways, connections) in runs {
        let ranks: Vec<_> = ways
            .into_iter()
            .zip(0..WORLD)
            .map(|((address, transport), rank)| {
                let address = address.clone();
                thread::spawn(move || train(address, job, rank, connections, transport))
            })
            .collect();
        let named = |transport| if transport == Auto { Memfd } else { transport }.to_string();
        for (rank, (_, transport)) in ranks.into_iter().zip(ways) {
            let (weights, hash, used) = rank.join().unwrap().unwrap();
            assert_eq!(used, named(transport), "{job}: the status names what is used");
            results.push((weights, hash));
        }
    }
    for other in &results[1..] {
        assert_eq!(other.1, results[0].1, "state hash");
        assert!(other.0 == results[0].0, "weights");
    }
    let begun = Instant::now();
    runtime.block_on(server.drain()).unwrap();
    assert!(begun.elapsed() < Duration::from_secs(20));
}

//! A server refuses the requests of a stock client that no client should send, without harm.

use std::{net::SocketAddr, time::Duration};

use bytes::Bytes;
use longshore_proto::{checksum::crc32, limits::CHUNK_BYTES};
use longshore_server::{Config, Server};
use longshore_wire::{
    fault_from_status,
    frame::{self, Piece},
    v1::{
        self, JoinRequest, OpenJobRequest, PushRequest, PushResponse, PushResult, UploadRequest,
        tensors_client::TensorsClient, training_client::TrainingClient,
    },
};
use tokio::sync::mpsc;
use tonic::transport::{Channel, Endpoint};

/// 1.5 MiB of bf16.
const ELEMENTS: u64 = 12 * 65536;

struct Stock {
    channel: Channel,
    tensors: TensorsClient<Channel>,
}

async fn start() -> (Server, String) {
    let config =
        Config { memory: 1 << 30, threads: 1, ..Config::default_on(SocketAddr::from(([127, 0, 0, 1], 0))) };
    let server = Server::start(config).await.unwrap();
    let address = format!("http://{}", server.address());
    (server, address)
}

fn spec(job: &str) -> v1::JobSpec {
    v1::JobSpec {
        name: job.into(),
        params: vec![v1::Param { name: "w".into(), shape: vec![ELEMENTS], group: 0 }],
        groups: vec!["all".into()],
        rule: v1::Rule::Sgd.into(),
        gradient_dtype: v1::Dtype::Bf16.into(),
        image_dtype: v1::Dtype::Bf16.into(),
        world_size: 1,
        micro_steps: 1,
        max_delay: 0,
        shard_elements: 16 * 65536,
        tier: v1::Tier::Memory.into(),
        ..Default::default()
    }
}

impl Stock {
    /// Opens and joins a job, and fills it with ones.
    async fn train(address: &str, job: &str) -> Stock {
        let channel = Endpoint::from_shared(address.to_string()).unwrap().connect().await.unwrap();
        let mut training = TrainingClient::new(channel.clone());
        let mut tensors = TensorsClient::new(channel.clone());
        let placement =
            v1::Placement { servers: vec![address.into()], owners: vec![0], ..Default::default() };
        let open = OpenJobRequest { spec: Some(spec(job)), placement: Some(placement), ..Default::default() };
        assert!(training.open_job(open).await.unwrap().into_inner().created);
        training
            .join(JoinRequest { job: job.into(), rank: 0, incarnation: 1, ..Default::default() })
            .await
            .unwrap();
        let ones: Vec<u8> = (0..ELEMENTS).flat_map(|_| 1.0f32.to_le_bytes()).collect();
        let chunks: Vec<UploadRequest> = ones
            .chunks(CHUNK_BYTES)
            .enumerate()
            .map(|(chunk, payload)| UploadRequest {
                job: job.into(),
                incarnation: 1,
                shard: 0,
                chunk: chunk as u32,
                crc32: crc32(payload),
                payload: payload.to_vec().into(),
                ..Default::default()
            })
            .collect();
        tensors.upload(tokio_stream::iter(chunks)).await.unwrap();
        Stock { channel, tensors }
    }

    async fn push(&mut self, requests: Vec<PushRequest>) -> Vec<PushResult> {
        let mut answers = self.tensors.push(tokio_stream::iter(requests)).await.unwrap().into_inner();
        let mut results = Vec::new();
        while let Some(answer) = answers.message().await.unwrap() {
            results.extend(answer.results);
        }
        results
    }
}

/// 2.0 as bf16 for every element of the gradient.
fn gradient(job: &str) -> Vec<PushRequest> {
    let flat: Vec<u8> = (0..ELEMENTS).flat_map(|_| 0x4000u16.to_le_bytes()).collect();
    let request = |(chunk, payload): (usize, &[u8])| PushRequest {
        job: job.into(),
        incarnation: 1,
        rank: 0,
        step: 1,
        micro_step: 0,
        shard: 0,
        chunk: chunk as u32,
        loss_scale: 1.0,
        dtype: v1::Dtype::Bf16.into(),
        crc32: crc32(payload),
        payload: payload.to_vec().into(),
        ..Default::default()
    };
    flat.chunks(CHUNK_BYTES).enumerate().map(request).collect()
}

/// Sends raw bytes as a push. Returns the field that the server blames.
async fn blamed(stock: &mut Stock, bytes: &[u8]) -> String {
    let (pieces, requests) = mpsc::channel(1);
    let call = frame::call::<PushResponse>(&mut stock.channel, "/longshore.v1.Tensors/Push", requests);
    let piece = Piece { head: Bytes::copy_from_slice(bytes), payload: Bytes::new() };
    pieces.send(Ok(piece)).await.unwrap();
    drop(pieces);
    let mut answers = call.await.unwrap();
    loop {
        match answers.next().await {
            Ok(Some(_)) => {}
            Ok(None) => return "nothing".into(),
            Err(status) => return fault_from_status(&status, "here").field,
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_malformed_push_ends_its_stream_and_nothing_else() {
    let (_server, address) = start().await;
    let mut stock = Stock::train(&address, "job").await;
    assert_eq!(blamed(&mut stock, &[1, 0, 0, 0, 0]).await, "message.compressed");
    assert_eq!(blamed(&mut stock, &[0, 0x7F, 0, 0, 0]).await, "message");
    assert_eq!(blamed(&mut stock, &[0, 0, 0, 0, 2, 0x0A, 0x7F]).await, "message");
    // The head of a sound chunk comes with half of its payload, and its slot is free again.
    let sound = gradient("job");
    let head = PushRequest { payload: Bytes::new(), ..sound[0].clone() };
    let piece = frame::encode_with(&head, sound[0].payload.clone());
    let half = [&piece.head[..], &piece.payload[..CHUNK_BYTES / 2]].concat();
    assert_eq!(blamed(&mut stock, &half).await, "message");
    let results = tokio::time::timeout(Duration::from_secs(10), stock.push(sound)).await.unwrap();
    assert!(results.len() == 2 && results.iter().all(|result| result.refusal.is_none()), "{results:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_field_of_a_newer_client_is_refused() {
    let (_server, address) = start().await;
    let mut channel = Endpoint::from_shared(address).unwrap().connect().await.unwrap();
    let newer = Piece { head: Bytes::from_static(&[0, 0, 0, 0, 2, 9 << 3, 1]), payload: Bytes::new() };
    let call = frame::call_once::<PushResponse>(&mut channel, "/longshore.v1.Training/OpenJob", newer);
    let refused = fault_from_status(&call.await.err().unwrap(), "here");
    assert_eq!(refused.field, "OpenJobRequest", "{refused}");
}

//! Raw-frame calls against tonic's generated server: each side must understand the other.

mod echo;
mod wrapped;

use std::time::Duration;

use bytes::Bytes;
use longshore_wire::{
    frame::{self, Event, Incoming, PULL, PUSH},
    v1::{PullRequest, PullResponse, PushRequest, PushResponse, Slice, tensors_server::TensorsServer},
};
use tokio::{net::TcpListener, sync::mpsc};
use tonic::{
    Code, Status,
    transport::{Channel, Endpoint, Server, server::TcpIncoming},
};

use self::echo::Echo;

async fn connect() -> Channel {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let service = TensorsServer::new(Echo);
    tokio::spawn(Server::builder().add_service(service).serve_with_incoming(TcpIncoming::from(listener)));
    Endpoint::from_shared(format!("http://{address}")).unwrap().connect().await.unwrap()
}

#[tokio::test]
async fn a_generated_server_takes_pushes_of_any_size() {
    let (pieces, requests) = mpsc::channel(1);
    let mut channel = connect().await;
    let call = frame::call::<PushResponse>(&mut channel, PUSH, requests);
    let sizes = [0usize, 1, 255, 256, 70_000, 1 << 20];
    let sending = async {
        for (index, size) in sizes.into_iter().enumerate() {
            let head = PushRequest { job: "echo".into(), step: index as u64 + 1, ..Default::default() };
            let payload = Bytes::from(vec![index as u8; size]);
            pieces.send(Ok(frame::encode_with(&head, payload))).await.unwrap();
        }
        drop(pieces);
    };
    let receiving = async {
        let mut answers = call.await.unwrap();
        let mut steps = Vec::new();
        while let Some(event) = answers.next().await.unwrap() {
            let Event::Head(answer, _) = event else { continue };
            for result in answer.results {
                let index = result.step as usize - 1;
                let payload = vec![index as u8; sizes[index]];
                assert_eq!(result.chunk, longshore_proto::checksum::crc32(&payload));
                steps.push(result.step);
            }
        }
        assert_eq!(steps, [1, 2, 3, 4, 5, 6]);
    };
    tokio::time::timeout(Duration::from_secs(20), async { tokio::join!(sending, receiving) }).await.unwrap();
}

/// Returns a request for two slices, of 300,000 and of 500,000 bytes.
fn request(job: &str, version: u64) -> PullRequest {
    let slices =
        [3u32, 5].map(|shard| Slice { shard, offset: 64, elements: u64::from(shard) * 100_000 }).to_vec();
    PullRequest { job: job.into(), version, slices, ..Default::default() }
}

async fn pull(channel: &mut Channel, job: &str, version: u64) -> Result<Incoming<PullResponse>, Status> {
    frame::call_once(channel, PULL, frame::encode(&request(job, version))).await
}

#[tokio::test]
async fn a_generated_servers_answers_are_understood() {
    let mut channel = connect().await;
    let mut answers = pull(&mut channel, "echo", 1).await.unwrap();
    let mut found = Vec::new();
    let mut payload = Vec::new();
    while let Some(event) = answers.next().await.unwrap() {
        match event {
            Event::Head(head, bytes) => found.push((head.shard, head.offset, head.crc32, bytes)),
            Event::Payload(slice) => payload.extend_from_slice(&slice),
            Event::End => {}
        }
    }
    assert_eq!(found, [(3, 64, 7, 300_000), (5, 64, 7, 500_000)]);
    assert_eq!(payload, [vec![3; 300_000], vec![5; 500_000]].concat());
}

#[tokio::test]
async fn a_generated_servers_statuses_are_understood() {
    let mut channel = connect().await;
    let refused = pull(&mut channel, "other", 1).await.err().unwrap();
    assert_eq!((refused.code(), refused.message()), (Code::NotFound, "no such job"));
    let mut answers = pull(&mut channel, "echo", 9).await.unwrap();
    let failed = loop {
        match answers.next().await {
            Ok(Some(_)) => {}
            Ok(None) => panic!("the status was lost"),
            Err(status) => break status,
        }
    };
    assert_eq!((failed.code(), failed.message()), (Code::DataLoss, "half way"));
    let request = frame::encode(&PullRequest::default());
    let unknown = frame::call_once::<PullResponse>(&mut channel, "/longshore.v1.Tensors/Nothing", request);
    assert_eq!(unknown.await.err().unwrap().code(), Code::Unimplemented);
}

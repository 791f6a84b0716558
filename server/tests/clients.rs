//! A client sends damaged messages, or makes false claims about shared memory. Only that client is harmed.

use std::{fs, net::SocketAddr, os::fd::OwnedFd, os::unix::fs::FileExt, time::Duration};

use bytes::Bytes;
use longshore_engine::memory::Foreign;
use longshore_proto::{FaultKind, Incarnation, checksum::crc32};
use longshore_server::{Config, Server};
use longshore_wire::{
    fault_from_status, fault_from_wire,
    frame::{self, Piece},
    memfd::{STALE, Socket},
    v1::{
        self, JoinRequest, MemfdAnswer, MemfdHello, MemfdMemory, MemfdOffer, MemfdPlace, MemfdRequest,
        OpenJobRequest, PullRequest, PushRequest, PushResponse, UploadRequest, memfd_answer::Answer,
        memfd_request::Request, tensors_client::TensorsClient, training_client::TrainingClient,
    },
};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use tokio::sync::mpsc;
use tonic::transport::Channel;

const ELEMENTS: u64 = 4 * 65536;
const BYTES: u64 = ELEMENTS * 2;
const JOB: &str = "job";

struct Client {
    channel: Channel,
    training: TrainingClient<Channel>,
    tensors: TensorsClient<Channel>,
    offer: MemfdOffer,
}

async fn server() -> Server {
    let config = Config {
        memory: 1 << 30,
        threads: 1,
        // Some tests leave a step that no rank finishes.
        drain_deadline: Duration::from_millis(100),
        ..Config::default_on(SocketAddr::from(([127, 0, 0, 1], 0)))
    };
    Server::start(config).await.unwrap()
}

fn spec() -> v1::JobSpec {
    v1::JobSpec {
        name: JOB.into(),
        params: vec![v1::Param { name: "w".into(), shape: vec![ELEMENTS], group: 0 }],
        groups: vec!["all".into()],
        rule: v1::Rule::Sgd.into(),
        gradient_dtype: v1::Dtype::Bf16.into(),
        image_dtype: v1::Dtype::Bf16.into(),
        world_size: 2,
        micro_steps: 1,
        max_delay: 0,
        shard_elements: 4 * 65536,
        tier: v1::Tier::Memory.into(),
        ..v1::JobSpec::default()
    }
}

/// Returns a client of a job of two ranks. Incarnation 1 of each rank has joined, and all weights are 1.0.
async fn train(server: &Server) -> Client {
    let channel =
        Channel::from_shared(format!("http://{}", server.address())).unwrap().connect().await.unwrap();
    let mut training = TrainingClient::new(channel.clone());
    let mut tensors = TensorsClient::new(channel.clone());
    let placement = v1::Placement { servers: vec!["here".into()], owners: vec![0], ..Default::default() };
    let open = OpenJobRequest { spec: Some(spec()), placement: Some(placement), ..Default::default() };
    training.open_job(open).await.unwrap();
    let join = |rank| JoinRequest { job: JOB.into(), rank, incarnation: 1, ..Default::default() };
    training.join(join(0)).await.unwrap();
    let offer = training.join(join(1)).await.unwrap().into_inner().memfd.expect("an offer");
    let ones: Vec<u8> = (0..ELEMENTS).flat_map(|_| 1.0f32.to_le_bytes()).collect();
    let upload = |payload: &[u8]| UploadRequest {
        job: JOB.into(),
        incarnation: 1,
        shard: 0,
        chunk: 0,
        crc32: crc32(payload),
        payload: payload.to_vec().into(),
        ..Default::default()
    };
    tensors.upload(tokio_stream::iter([upload(&ones)])).await.unwrap();
    Client { channel, training, tensors, offer }
}

fn memfd(name: &str, bytes: u64, seals: SealFlags) -> fs::File {
    let file = memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
    ftruncate(&file, bytes).unwrap();
    fcntl_add_seals(&file, seals).unwrap();
    fs::File::from(file)
}

const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW);

/// A socket at the client's end of a link, without the worker library.
struct Raw(Socket);

impl Raw {
    fn connect(client: &Client) -> Raw {
        Raw(Socket::connect(&client.offer.socket).unwrap())
    }

    async fn ask(&self, request: Request, passed: Option<&fs::File>) -> (Answer, Option<OwnedFd>) {
        self.0.send(&MemfdRequest { request: Some(request) }, passed).await.unwrap();
        let packet = self.0.receive::<MemfdAnswer>().await.unwrap().expect("an answer");
        (packet.message.answer.unwrap(), packet.descriptor)
    }

    async fn refused(&self, request: Request, passed: Option<&fs::File>) -> longshore_proto::Fault {
        match self.ask(request, passed).await.0 {
            Answer::Refusal(fault) => fault_from_wire(fault),
            other => panic!("not refused: {other:?}"),
        }
    }

    async fn hello(client: &Client, rank: u32) -> (Raw, u64, Foreign) {
        let raw = Raw::connect(client);
        let hello = Request::Hello(MemfdHello { job: JOB.into(), rank, incarnation: 1 });
        let (Answer::Welcome(welcome), images) = raw.ask(hello, None).await else { panic!("no welcome") };
        let images = Foreign::map(images.expect("images"), welcome.image_bytes, 1 << 30).unwrap();
        (raw, welcome.link, images)
    }

    async fn pass(&self, file: &fs::File) -> u32 {
        let bytes = file.metadata().unwrap().len();
        match self.ask(Request::Memory(MemfdMemory { bytes }), Some(file)).await.0 {
            Answer::Taken(taken) => taken.memory,
            other => panic!("not taken: {other:?}"),
        }
    }
}

impl Client {
    /// Pushes a chunk. Returns true if the server already had the chunk, or the fault.
    async fn push(&mut self, request: PushRequest) -> Result<bool, longshore_proto::Fault> {
        let mut answers = self.tensors.push(tokio_stream::iter([request])).await.unwrap().into_inner();
        let result = answers.message().await.unwrap().unwrap().results.remove(0);
        let held = result.duplicate || result.superseded || result.decided;
        result.refusal.map_or(Ok(held), |fault| Err(fault_from_wire(fault)))
    }
}

/// Returns a gradient whose elements are all 2.0 in bf16.
fn gradient() -> Vec<u8> {
    (0..ELEMENTS).flat_map(|_| 0x4000u16.to_le_bytes()).collect()
}

fn chunk(rank: u32, place: Option<MemfdPlace>) -> PushRequest {
    PushRequest {
        job: JOB.into(),
        incarnation: 1,
        rank,
        step: 1,
        loss_scale: 1.0,
        dtype: v1::Dtype::Bf16.into(),
        crc32: crc32(&gradient()),
        place,
        ..Default::default()
    }
}

/// Sends raw bytes as a push. Returns the field that the server blames.
async fn blamed(client: &mut Client, bytes: &[u8]) -> String {
    let (pieces, requests) = mpsc::channel(1);
    let call = frame::call::<PushResponse>(&mut client.channel, "/longshore.v1.Tensors/Push", requests);
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
    let server = server().await;
    let mut client = train(&server).await;
    assert_eq!(blamed(&mut client, &[1, 0, 0, 0, 0]).await, "message.compressed");
    assert_eq!(blamed(&mut client, &[0, 0x7F, 0, 0, 0]).await, "message");
    assert_eq!(blamed(&mut client, &[0, 0, 0, 0, 2, 0x0A, 0x7F]).await, "message");
    // The head of a sound chunk comes with half of its payload. The chunk's slot must be free again afterwards.
    let piece = frame::encode_with(&chunk(0, None), gradient().into());
    let half = [&piece.head[..], &piece.payload[..BYTES as usize / 2]].concat();
    assert_eq!(blamed(&mut client, &half).await, "message");
    let sound = PushRequest { payload: gradient().into(), ..chunk(0, None) };
    let pushed = tokio::time::timeout(Duration::from_secs(10), client.push(sound)).await;
    assert_eq!(pushed.expect("a free slot"), Ok(false));
    let newer = Piece { head: Bytes::from_static(&[0, 0, 0, 0, 2, 9 << 3, 1]), payload: Bytes::new() };
    let call = frame::call_once::<PushResponse>(&mut client.channel, "/longshore.v1.Training/OpenJob", newer);
    let refused = fault_from_status(&call.await.err().unwrap(), "here");
    assert_eq!(refused.field, "OpenJobRequest", "{refused}");
    server.drain().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lies_are_refused_by_name_and_the_truth_after_them_is_taken() {
    let server = server().await;
    let mut client = train(&server).await;
    let (raw, link, images) = Raw::hello(&client, 0).await;
    let file = memfd("longshore-test-lies", 4 * BYTES, SEALS);
    file.write_all_at(&gradient(), BYTES).unwrap();
    let memory = raw.pass(&file).await;
    let right = MemfdPlace { link, memory, offset: BYTES, bytes: BYTES, lent: false };
    let (other, others_link, _) = Raw::hello(&client, 1).await;

    let lies = [
        ("memfd.place", FaultKind::Invalid, MemfdPlace { offset: 4 * BYTES - 1, ..right }),
        ("memfd.place", FaultKind::Invalid, MemfdPlace { offset: u64::MAX, ..right }),
        ("memfd.place", FaultKind::Invalid, MemfdPlace { bytes: u64::MAX, ..right }),
        ("payload", FaultKind::Invalid, MemfdPlace { bytes: BYTES - 2, ..right }),
        ("payload", FaultKind::Invalid, MemfdPlace { bytes: 0, ..right }),
        ("memfd.memory", FaultKind::Invalid, MemfdPlace { memory: memory + 1, ..right }),
        ("memfd.rank", FaultKind::Invalid, MemfdPlace { link: others_link, memory: 0, ..right }),
        (STALE, FaultKind::Precondition, MemfdPlace { link: link ^ 1, ..right }),
        ("push.place", FaultKind::Invalid, MemfdPlace { offset: BYTES + 2, lent: true, ..right }),
        ("payload", FaultKind::Invalid, MemfdPlace { bytes: BYTES - 2, lent: true, ..right }),
        // The request names memory to which no payload was written.
        ("push.crc32", FaultKind::Corrupt, MemfdPlace { offset: 0, ..right }),
    ];
    for (field, kind, place) in lies {
        let fault = client.push(chunk(0, Some(place))).await.unwrap_err();
        assert_eq!((fault.field.as_str(), fault.kind), (field, kind), "{place:?}: {fault}");
        assert!(!fault.remedy.is_empty());
    }
    let both = PushRequest { payload: gradient().into(), ..chunk(0, Some(right)) };
    assert_eq!(client.push(both).await.unwrap_err().field, "push.place");
    let part = PushRequest { chunk: 1, ..chunk(0, Some(MemfdPlace { lent: true, ..right })) };
    assert_eq!(client.push(part).await.unwrap_err().field, "chunk");
    let later = PushRequest { incarnation: 2, ..chunk(0, Some(right)) };
    assert!(client.push(later).await.is_err());

    // Refused pushes did not count: the same chunk is new now, held at its repetition, and its step ends right.
    assert_eq!(client.push(chunk(0, Some(right))).await, Ok(false));
    assert_eq!(client.push(chunk(0, Some(right))).await, Ok(true));
    // From now on the worker may overwrite its memory.
    file.write_all_at(&vec![0xFF; BYTES as usize], BYTES).unwrap();
    let place = MemfdPlace { link: others_link, memory: other.pass(&file).await, ..right };
    assert_eq!(client.push(chunk(1, Some(place))).await.unwrap_err().kind, FaultKind::Corrupt);
    file.write_all_at(&gradient(), BYTES).unwrap();
    assert_eq!(client.push(chunk(1, Some(place))).await, Ok(false));
    step_and_read(&mut client, link, &images).await;
    drop((raw, other));
    server.drain().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_lent_is_used_where_it_lies_and_given_back() {
    let server = server().await;
    let mut client = train(&server).await;
    let file = memfd("longshore-test-lent", 2 * BYTES, SEALS);
    file.write_all_at(&gradient(), BYTES).unwrap();
    let (raw, link, images) = Raw::hello(&client, 0).await;
    let (other, others_link, _) = Raw::hello(&client, 1).await;
    let place = MemfdPlace { link, memory: raw.pass(&file).await, offset: BYTES, bytes: BYTES, lent: true };
    // A lent gradient has no checksum, so the number 7 does not matter.
    let lent = PushRequest { crc32: 7, ..chunk(0, Some(place)) };
    assert_eq!(client.push(lent.clone()).await, Ok(false));
    assert_eq!(client.push(lent).await, Ok(true));
    // After a broken link, the same gradient may come as a payload. Its checksum counts then, and a wrong one is
    // refused.
    assert_eq!(client.push(PushRequest { payload: gradient().into(), ..chunk(0, None) }).await, Ok(true));
    let wrong = PushRequest { crc32: 7, payload: gradient().into(), ..chunk(0, None) };
    assert_eq!(client.push(wrong).await.unwrap_err().kind, FaultKind::Corrupt);
    // The server reads a lent gradient only once the last rank's gradient is there. A change of the bytes therefore
    // counts.
    let threes: Vec<u8> = (0..ELEMENTS).flat_map(|_| 0x4040u16.to_le_bytes()).collect();
    file.write_all_at(&threes, BYTES).unwrap();
    let ones: Vec<u8> = (0..ELEMENTS).flat_map(|_| 0x3F80u16.to_le_bytes()).collect();
    let inline = PushRequest { crc32: crc32(&ones), payload: ones.into(), ..chunk(1, None) };
    assert_eq!(client.push(inline).await, Ok(false));
    step_and_read(&mut client, link, &images).await;
    // The server has given the lent memory back, so the worker may end and take the memory with it.
    drop((raw, other, others_link));
    server.drain().await.unwrap();
}

fn pull(link: u64) -> PullRequest {
    PullRequest {
        job: JOB.into(),
        version: 1,
        dtype: v1::Dtype::Bf16.into(),
        slices: vec![v1::Slice { shard: 0, offset: 64, elements: ELEMENTS - 64 }],
        deadline_ms: 10_000,
        link,
        ..Default::default()
    }
}

/// Commits step 1 of SGD with learning rate 0.25, and pulls the weights. The mean of two gradients of 2.0 turns weights
/// of 1.0 into 0.5.
async fn step_and_read(client: &mut Client, link: u64, images: &Foreign) {
    let hyper = v1::Hyper { lr: 0.25, ..Default::default() };
    let commit = v1::Commit {
        step: 1,
        gradient_scale: 2.0,
        clip_coefficient: 1.0,
        groups: vec![hyper],
        loss_scale: 1.0,
        ..Default::default()
    };
    let mut stats = client
        .training
        .stats(v1::StatsRequest { job: JOB.into(), step: 1, deadline_ms: 10_000 })
        .await
        .unwrap()
        .into_inner();
    assert_eq!(stats.message().await.unwrap().unwrap().blocks.len(), 4);
    let commit =
        v1::CommitRequest { job: JOB.into(), incarnation: 1, commit: Some(commit), origin: 0, report: None };
    client.training.commit(commit).await.unwrap();
    let stepped: Vec<u8> = (64..ELEMENTS).flat_map(|_| 0x3F00u16.to_le_bytes()).collect();
    let mut answers = client.tensors.pull(pull(link)).await.unwrap().into_inner();
    let answer = answers.message().await.unwrap().unwrap();
    assert!(answer.payload.is_empty());
    let place = answer.place.expect("in place");
    assert_eq!((place.elements, images.stamp(place.stamp)), (ELEMENTS - 64, 2));
    let mut bytes = vec![0; (place.elements * 2) as usize];
    images.source(place.at, bytes.len() as u64).copy_to(&mut bytes);
    assert!(bytes == stepped);

    // A caller without a link of this job gets the same bytes as payloads.
    let mut answers = client.tensors.pull(pull(0)).await.unwrap().into_inner();
    let mut sent = Vec::new();
    while let Some(answer) = answers.message().await.unwrap() {
        assert!(answer.place.is_none());
        sent.extend_from_slice(&answer.payload);
    }
    assert!(sent == stepped);
    let unknown = client.tensors.pull(pull(link ^ 1)).await.unwrap_err();
    assert!(unknown.message().contains(STALE), "{unknown}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_no_right_memory_or_hello_is_refused_and_the_link_goes_on() {
    let server = server().await;
    let client = train(&server).await;
    let hello = |job: &str, rank, incarnation: Incarnation| {
        Request::Hello(MemfdHello { job: job.into(), rank, incarnation: incarnation.0 })
    };
    for (request, kind, field) in [
        (hello("nobody", 0, Incarnation(1)), FaultKind::NotFound, "job"),
        (hello(JOB, 2, Incarnation(1)), FaultKind::Invalid, "rank"),
        (hello(JOB, 0, Incarnation(2)), FaultKind::Precondition, "rank"),
        (hello(JOB, 0, Incarnation(0)), FaultKind::Fenced, "incarnation"),
        (Request::Memory(MemfdMemory { bytes: 1 }), FaultKind::Invalid, "memfd.request"),
    ] {
        let fault = Raw::connect(&client).refused(request, None).await;
        assert_eq!((fault.kind, fault.field.as_str()), (kind, field), "{fault}");
    }
    let (raw, ..) = Raw::hello(&client, 0).await;
    let memory = |bytes| Request::Memory(MemfdMemory { bytes });
    let unsealed = memfd("longshore-test-unsealed", 4096, SealFlags::empty());
    let sealed = memfd("longshore-test-sealed", 4096, SEALS);
    let ordinary = tempfile::tempfile().unwrap();
    ordinary.set_len(4096).unwrap();
    assert_eq!(raw.refused(memory(4096), Some(&unsealed)).await.field, "memfd.memory");
    assert_eq!(raw.refused(memory(4096), Some(&ordinary)).await.field, "memfd.memory");
    assert_eq!(raw.refused(memory(1 << 40), Some(&sealed)).await.field, "memfd.memory");
    assert_eq!(raw.refused(memory(8192), Some(&sealed)).await.field, "memfd.memory");
    assert_eq!(raw.refused(memory(4096), None).await.field, "memfd.descriptor");
    assert_eq!(raw.refused(hello(JOB, 0, Incarnation(1)), None).await.field, "memfd.request");
    assert_eq!(raw.pass(&sealed).await, 0);
    server.drain().await.unwrap();
}

/// Returns whether this process, which also runs the server, maps a memfd of this name.
fn mapped(name: &str) -> bool {
    fs::read_to_string("/proc/self/maps").unwrap().contains(name)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_goes_leaves_nothing_mapped_and_a_new_one_replaces_it() {
    let server = server().await;
    let mut client = train(&server).await;
    let (raw, link, _) = Raw::hello(&client, 0).await;
    let file = memfd("longshore-test-gone", BYTES, SEALS);
    file.write_all_at(&gradient(), 0).unwrap();
    let place = MemfdPlace { link, memory: raw.pass(&file).await, offset: 0, bytes: BYTES, lent: false };
    drop(file);
    assert!(mapped("longshore-test-gone"));
    drop(raw);
    // The kernel reports the closed socket to the server after a while.
    let gone = async {
        while mapped("longshore-test-gone") {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(10), gone).await.expect("unmapped");
    assert_eq!(client.push(chunk(0, Some(place))).await.unwrap_err().field, STALE);

    // A second hello of the same process replaces the first link, which no longer counts although its socket is open.
    let (_first, first, _) = Raw::hello(&client, 0).await;
    let (second_raw, second, _) = Raw::hello(&client, 0).await;
    assert_ne!(first, second);
    let file = memfd("longshore-test-again", BYTES, SEALS);
    file.write_all_at(&gradient(), 0).unwrap();
    let memory = second_raw.pass(&file).await;
    let void = MemfdPlace { link: first, memory, ..place };
    assert_eq!(client.push(chunk(0, Some(void))).await.unwrap_err().field, STALE);
    let right = MemfdPlace { link: second, memory, ..place };
    assert_eq!(client.push(chunk(0, Some(right))).await, Ok(false));
    server.drain().await.unwrap();
}

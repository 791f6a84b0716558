//! A device implemented outside the worker, whose own thread copies with a delay. Runs on the device and on the host
//! have the same bits.

use std::{
    sync::{
        Arc, Condvar, Mutex,
        atomic::{AtomicUsize, Ordering::Relaxed},
        mpsc::{self, Sender},
    },
    thread,
    time::Duration,
};

use longshore_tests::conformance::{cluster::Cluster, gpt::Bytes, run::check, scenario::Scenario};
use longshore_worker::{
    Budget, Device, Error, HostDevice, Lease, Result,
    device::{Buffer, Event, HostBuffer, Transfer},
};

const NAME: &str = "late";
/// The delay of a copy. The delay exceeds a copy's own time, so that code which does not wait finds the old bytes.
const LATE: Duration = Duration::from_micros(300);
/// The byte that fills memory until a copy arrives. Numbers of such bytes are NaN, so no run continues with them.
const UNDEFINED: u8 = 0xFF;

type Copy = Box<dyn FnOnce() + Send>;

struct Late {
    budget: Budget,
    copies: Sender<Copy>,
    made: Arc<AtomicUsize>,
}

/// The device's own memory.
struct LateMemory {
    bytes: Arc<Mutex<Vec<u8>>>,
    _lease: Lease,
}

/// A copy on its way to the host. The buffer is there once the copy has arrived.
#[derive(Default)]
struct Coming {
    host: Mutex<Option<HostBuffer>>,
    came: Condvar,
}

struct End(Arc<Coming>);

impl Event for End {
    fn wait(&mut self) -> Result<HostBuffer> {
        let held = self.0.host.lock().unwrap();
        let mut held = self.0.came.wait_while(held, |host| host.is_none()).unwrap();
        Ok(held.take().unwrap())
    }
}

impl Late {
    fn new(budget: u64) -> Late {
        let (copies, orders) = mpsc::channel::<Copy>();
        thread::spawn(move || {
            for copy in orders {
                thread::sleep(LATE);
                copy();
            }
        });
        Late { budget: Budget::new(NAME, budget), copies, made: Arc::default() }
    }

    fn start(
        &self,
        memory: &LateMemory,
        mut host: HostBuffer,
        copy: impl FnOnce(&mut [u8], &mut HostBuffer) + Send + 'static,
    ) -> Transfer {
        let coming = Arc::new(Coming::default());
        let (end, bytes, made) = (End(coming.clone()), memory.bytes.clone(), self.made.clone());
        let order = move || {
            copy(&mut bytes.lock().unwrap(), &mut host);
            made.fetch_add(1, Relaxed);
            *coming.host.lock().unwrap() = Some(host);
            coming.came.notify_all();
        };
        self.copies.send(Box::new(order)).unwrap();
        Transfer::under_way(end)
    }
}

impl Device for Late {
    fn name(&self) -> &str {
        NAME
    }

    fn budget(&self) -> &Budget {
        &self.budget
    }

    fn allocate(&self, field: &str, bytes: u64) -> Result<Buffer> {
        let lease = self.budget.reserve(field, bytes)?;
        let memory = vec![UNDEFINED; bytes as usize];
        Ok(Buffer::new(LateMemory { bytes: Arc::new(Mutex::new(memory)), _lease: lease }, bytes))
    }

    fn allocate_host(&self, bytes: u64) -> Result<HostBuffer> {
        Ok(HostBuffer::new(vec![0; bytes as usize]))
    }

    fn copy_in(&self, source: HostBuffer, target: &Buffer, offset: u64) -> Result<Transfer> {
        let memory: &LateMemory = target.memory(NAME, offset, source.len() as u64)?;
        Ok(self.start(memory, source, move |device, host| {
            device[offset as usize..][..host.len()].copy_from_slice(host);
        }))
    }

    fn copy_out(&self, source: &Buffer, offset: u64, mut target: HostBuffer) -> Result<Transfer> {
        let memory: &LateMemory = source.memory(NAME, offset, target.len() as u64)?;
        target.fill(UNDEFINED);
        Ok(self.start(memory, target, move |device, host| {
            let bytes = host.len();
            host.copy_from_slice(&device[offset as usize..][..bytes]);
        }))
    }
}

#[test]
fn a_run_on_a_device_from_outside_has_the_bits_of_one_on_the_host() {
    let cluster = Cluster::start(1);
    let late = Arc::new(Late::new(1 << 30));
    let (host, outside) = (Bytes::new(Arc::new(HostDevice::new(1 << 30))), Bytes::new(late.clone()));
    let plan = Scenario { micro_steps: 2, clip: Some(1.0), ..Scenario::exact(3) };
    let expected = check(&cluster, &host, &plan, "host");
    assert_eq!(check(&cluster, &outside, &plan, "late"), expected);
    let whole = late.made.load(Relaxed);
    assert_eq!(check(&cluster, &outside, &Scenario { on_demand: true, ..plan }, "late-staged"), expected);
    assert!(whole > 0 && late.made.load(Relaxed) > whole, "nothing was copied");
    assert!(late.budget.peak() > 0);
    assert_eq!(late.budget.used(), 0, "what was allocated was not given back");
}

#[test]
fn copies_of_a_device_from_outside_are_checked_and_awaited() {
    let device = Late::new(100);
    let buffer = device.allocate("weights", 64).unwrap();
    assert!(matches!(device.allocate("more", 64), Err(Error::Shortage(_))));
    let mut host = device.allocate_host(16).unwrap();
    host.fill(7);
    let transfer = device.copy_in(host, &buffer, 48).unwrap();
    // A dropped transfer waits for its copy.
    drop(transfer);
    assert_eq!(device.made.load(Relaxed), 1);
    let host = device.allocate_host(32).unwrap();
    let host = device.copy_out(&buffer, 32, host).unwrap().wait().unwrap();
    assert_eq!(host[..], [[UNDEFINED; 16], [7; 16]].concat());
    assert!(matches!(device.copy_in(host, &buffer, 33), Err(Error::Device(_))));
    let elsewhere = HostDevice::new(64).allocate("weights", 64).unwrap();
    let host = device.allocate_host(64).unwrap();
    assert!(matches!(device.copy_in(host, &elsewhere, 0), Err(Error::Device(_))));
    drop(buffer);
    assert_eq!(device.budget().used(), 0);
}

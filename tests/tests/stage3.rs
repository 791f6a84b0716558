//! A model trains on a device that holds an eighth of its 16-bit weights, with the bits of a run without a budget.

use longshore_tests::{
    event::End,
    server::{self, ServerOptions},
    train::Train,
};
use tempfile::TempDir;

const STEPS: u64 = 6;

/// Many small layers, so that the layer in use and its activations take little beside the whole model.
const DEEP: [&str; 10] =
    ["--layers", "96", "--width", "32", "--heads", "2", "--context", "8", "--batch", "1"];

fn train(job: &str, servers: &[String], more: &[&str]) -> (u64, End) {
    let train = Train::new(STEPS).servers(servers).args(DEEP).args(["--job", job]).args(more);
    let said = train.run();
    (said.start.parameters, said.end)
}

#[test]
fn a_model_of_eight_times_the_device_has_the_bits_of_a_run_without_a_budget() {
    let servers = server::servers(2, &ServerOptions::new());
    let addresses = server::addresses(&servers);
    // State, gradients and images on the drives: with two buffers DRAM has two of a server's nine images.
    let root = TempDir::new().unwrap();
    let on_drives =
        ServerOptions::new().state_root(root.path()).args(["--spill", "all", "--storage-buffers", "2"]);
    let on_drives = server::servers(2, &on_drives);
    for schedule in [["--delay", "0"].as_slice(), &["--delay", "1", "--warmup-steps", "2"]] {
        let delay = schedule[1];
        let (parameters, free) = train(&format!("free-{delay}"), &addresses, schedule);
        // The state has 12 bytes a parameter, its contributions and images 4 more: 64 times the budget.
        let budget = parameters * 2 / 8;
        let text = budget.to_string();
        let bound = ["--device-budget", &text];
        let found = train(&format!("found-{delay}"), &addresses, &[schedule, &bound].concat()).1;
        let asked = [schedule, &bound, &["--stage", "3", "--micro-steps", "1"]].concat();
        let asked = train(&format!("asked-{delay}"), &addresses, &asked).1;
        let all = [schedule, &bound, &["--stage", "3", "--tier", "nvme"]].concat();
        let spilled = train(&format!("spilled-{delay}"), &server::addresses(&on_drives), &all).1;
        for run in [&found, &asked, &spilled] {
            assert_eq!(run.state_hash, free.state_hash, "delay {delay}");
            assert_eq!(run.validation_loss, free.validation_loss);
            assert!(run.device_peak_bytes <= budget, "{} of {budget}", run.device_peak_bytes);
        }
        assert!(free.device_peak_bytes > 8 * budget, "{} is no more than it", free.device_peak_bytes);
        println!(
            "delay {delay}: {budget} bytes, peaks {} and {}",
            found.device_peak_bytes, asked.device_peak_bytes
        );
    }
}

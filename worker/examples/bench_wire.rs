use clap::Parser;
#[derive(Parser)]
struct Cli {
    #[command(subcommand)]
    bench: longshore_worker::bench::Bench,
}
fn main() -> anyhow::Result<()> {
    longshore_worker::bench::run(Cli::parse().bench)
}

//! Processes of the test servers: their ports, their users, and their end.

use std::fs;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU16, Ordering};

/// A temporary folder and the processes that live in it. They end, and the folder goes, with this value, and also when
/// the test's process dies without unwinding: the cleaning is done by a shell that waits for the end of its input.
pub struct Nest {
    folder: PathBuf,
    janitor: Child,
}

impl Nest {
    /// A new folder. `ending` is a shell script that ends its processes; it runs in the folder, for as long as it takes.
    pub fn new(name: &str, ending: &str) -> Self {
        let folder =
            std::env::temp_dir().join(format!("pg-outbox-{name}-{:016x}", fastrand::u64(..)));
        fs::create_dir(&folder).expect("a temporary folder");
        // A Ctrl-C reaches the janitor as well, which is when it is needed.
        let script =
            format!("trap '' INT TERM HUP; read -r _\n(\n{ending}\n)\ncd / && rm -rf \"$OLDPWD\"");
        let mut janitor = Command::new("sh");
        janitor.args(["-c", &script]).current_dir(&folder).stdin(Stdio::piped());
        let janitor = janitor.stdout(Stdio::null()).stderr(Stdio::null()).spawn();
        Self { folder, janitor: janitor.expect("a shell") }
    }

    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Writes a file in the folder.
    pub fn write(&self, name: &str, text: &str) {
        fs::write(self.folder.join(name), text).expect("the temporary folder can be written");
    }

    /// A handle to the log file in the folder.
    pub fn log(&self) -> fs::File {
        let log = fs::File::options().append(true).create(true).open(self.folder.join("log"));
        log.expect("the log can be written")
    }

    /// The end of the log, for a panic.
    pub fn log_tail(&self) -> String {
        let log = fs::read(self.folder.join("log")).unwrap_or_default();
        String::from_utf8_lossy(&log[log.len().saturating_sub(2_000)..]).into_owned()
    }
}

impl Drop for Nest {
    fn drop(&mut self) {
        drop(self.janitor.stdin.take());
        let _ = self.janitor.wait();
    }
}

/// A port that nobody listens on. It lies below those that the kernel gives to outgoing connections, so that none of these
/// takes it while its server is down.
pub fn free_port() -> u16 {
    static FIRST: OnceLock<u16> = OnceLock::new();
    static NEXT: AtomicU16 = AtomicU16::new(0);
    let first = *FIRST.get_or_init(|| fastrand::u16(10_000..32_000));
    loop {
        let port = 10_000 + (first - 10_000 + NEXT.fetch_add(1, Ordering::Relaxed)) % 22_000;
        if TcpListener::bind(("127.0.0.1", port)).is_ok() {
            return port;
        }
    }
}

pub fn is_root() -> bool {
    fs::metadata("/proc/self").is_ok_and(|me| std::os::unix::fs::MetadataExt::uid(&me) == 0)
}

/// Whether a process exists and has not ended.
pub fn is_running(pid: u32) -> bool {
    let status = fs::read_to_string(format!("/proc/{pid}/status"));
    status.is_ok_and(|status| !status.contains("State:\tZ"))
}

pub fn signal(pid: u32, name: &str) {
    let status =
        Command::new("kill").args(["-s", name, &pid.to_string()]).stderr(Stdio::null()).status();
    status.expect("kill is there");
}

/// Every process of the machine.
pub fn all() -> impl Iterator<Item = u32> {
    let processes = fs::read_dir("/proc").expect("/proc").flatten();
    processes.filter_map(|entry| entry.file_name().to_str()?.parse().ok())
}

pub fn children(parent: u32) -> Vec<u32> {
    let parent = format!("PPid:\t{parent}");
    let is_child = |pid: &u32| {
        fs::read_to_string(format!("/proc/{pid}/status"))
            .is_ok_and(|status| status.lines().any(|line| line == parent))
    };
    all().filter(is_child).collect()
}

/// Runs a command to its end and returns what it wrote.
pub fn run(command: &mut Command) -> String {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    let (out, err) =
        (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{command:?}: {out}{err}");
    out.into_owned()
}

/// The first of these folders that has all of these programs.
pub fn find(places: Vec<PathBuf>, programs: &[&str]) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let mut places = places.into_iter().chain(std::env::split_paths(&path).collect::<Vec<_>>());
    places.find(|place| programs.iter().all(|name| place.join(name).is_file()))
}

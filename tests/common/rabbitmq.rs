//! RabbitMQ for tests: a broker of a test's own that can be stopped, killed, blocked and asked what it got.
//!
//! It is asked over its management interface, not by the client that is under test.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use serde_json::{Value, json};

use super::process::{Nest, find, free_port, run, signal};
use super::wait::eventually;

const PATIENCE: Duration = Duration::from_secs(90);

/// Ends both process groups: Erlang's name server outlives the broker unless it is ended by itself.
const ENDING: &str = r#"
for group in broker names; do
    read -r pid < $group && kill -s KILL -- "-$pid"
done
"#;

/// A broker of one test's own, which ends with it. User `guest`, password `guest`, virtual host `/`.
pub struct Rabbit {
    programs: PathBuf,
    amqp: u16,
    management: u16,
    distribution: u16,
    names: u16,
    name_server: Child,
    broker: Option<Child>,
    nest: Nest,
}

/// What a queue held.
#[derive(Debug, Clone, PartialEq)]
pub struct Delivery {
    pub exchange: String,
    pub routing_key: String,
    pub redelivered: bool,
    pub payload: Vec<u8>,
    /// As the management interface shows them: `message_id`, `content_type`, `delivery_mode`, `headers`, ...
    pub properties: Value,
}

impl Rabbit {
    /// A new broker with nothing declared.
    pub fn start() -> Self {
        let nest = Nest::new("rabbitmq", ENDING);
        let (amqp, management, names) = (free_port(), free_port(), free_port());
        nest.write(
            "rabbitmq.conf",
            &format!(
                "listeners.tcp.1 = 127.0.0.1:{amqp}\nmanagement.tcp.ip = 127.0.0.1\n\
                 management.tcp.port = {management}\n"
            ),
        );
        nest.write("enabled_plugins", "[rabbitmq_management].");
        let mut name_server = Command::new("epmd");
        name_server.args(["-address", "127.0.0.1", "-port", &names.to_string()]);
        let name_server = spawn(&mut name_server, &nest, "names", "Erlang (epmd)");
        let mut rabbit = Self {
            programs: find_programs(),
            amqp,
            management,
            distribution: free_port(),
            names,
            name_server,
            broker: None,
            nest,
        };
        rabbit.start_again();
        rabbit
    }

    /// For a client.
    pub fn url(&self) -> String {
        format!("amqp://guest:guest@127.0.0.1:{}/%2f", self.amqp)
    }

    pub fn port(&self) -> u16 {
        self.amqp
    }

    /// Where it lives until it ends.
    pub fn folder(&self) -> &Path {
        self.nest.folder()
    }

    pub fn management_url(&self) -> String {
        format!("http://guest:guest@127.0.0.1:{}", self.management)
    }

    /// Starts it with what it had, and waits until it answers.
    pub fn start_again(&mut self) {
        assert!(self.broker.is_none(), "RabbitMQ is running");
        let mut command = self.command("rabbitmq-server");
        self.broker = Some(spawn(&mut command, &self.nest, "broker", "RabbitMQ server"));
        eventually("RabbitMQ answers", PATIENCE, || {
            let broker = self.broker.as_mut().expect("it was started");
            let ended = broker.try_wait().expect("a child");
            assert!(ended.is_none(), "RabbitMQ ended at once: {}", self.nest.log_tail());
            TcpStream::connect(("127.0.0.1", self.amqp)).is_ok()
                && self.ask("GET", "/api/overview", None).is_some_and(|(status, _)| status == 200)
        });
    }

    /// Stops it in an orderly way and waits until it is gone.
    pub fn stop(&mut self) {
        if let Some(mut broker) = self.broker.take() {
            signal(broker.id(), "TERM");
            broker.wait().expect("a child");
            self.nest.write("broker", "");
        }
    }

    /// Kills it as a crash does and waits until it is gone.
    pub fn kill(&mut self) {
        if let Some(broker) = self.broker.take() {
            kill_group(broker);
            self.nest.write("broker", "");
        }
    }

    /// Raises the memory alarm: the broker stops reading from connections that publish.
    pub fn block(&self) {
        self.ctl(&["set_vm_memory_high_watermark", "0.0000001"]);
        self.wait_for_alarms(503);
    }

    pub fn unblock(&self) {
        self.ctl(&["set_vm_memory_high_watermark", "0.4"]);
        self.wait_for_alarms(200);
    }

    fn wait_for_alarms(&self, expected: u16) {
        let check = "/api/health/checks/local-alarms";
        eventually("the alarm changes", PATIENCE, || {
            self.ask("GET", check, None).is_some_and(|(status, _)| status == expected)
        });
    }

    /// Closes every client connection with a reason, as an operator does.
    pub fn close_all_connections(&self, reason: &str) {
        self.ctl(&["close_all_connections", reason]);
    }

    /// Runs `rabbitmqctl` and returns what it wrote.
    pub fn ctl(&self, arguments: &[&str]) -> String {
        run(self.command("rabbitmqctl").arg("-q").args(arguments))
    }

    /// A durable exchange; `kind` is `direct`, `topic`, `fanout` or `headers`.
    pub fn declare_exchange(&self, name: &str, kind: &str) {
        let path = format!("/api/exchanges/%2f/{}", escaped(name));
        self.request("PUT", &path, Some(json!({"type": kind, "durable": true})));
    }

    /// A durable queue, with arguments such as `{"x-max-length": 1}`, or `{}`.
    pub fn declare_queue(&self, name: &str, arguments: Value) {
        let path = format!("/api/queues/%2f/{}", escaped(name));
        self.request("PUT", &path, Some(json!({"durable": true, "arguments": arguments})));
    }

    pub fn bind(&self, exchange: &str, queue: &str, routing_key: &str) {
        let path = format!("/api/bindings/%2f/e/{}/q/{}", escaped(exchange), escaped(queue));
        self.request("POST", &path, Some(json!({"routing_key": routing_key})));
    }

    /// A topic exchange and a queue of the same name that gets everything.
    pub fn route(&self, name: &str) {
        self.declare_exchange(name, "topic");
        self.declare_queue(name, json!({}));
        self.bind(name, name, "#");
    }

    pub fn delete_exchange(&self, name: &str) {
        self.request("DELETE", &format!("/api/exchanges/%2f/{}", escaped(name)), None);
    }

    pub fn delete_queue(&self, name: &str) {
        self.request("DELETE", &format!("/api/queues/%2f/{}", escaped(name)), None);
    }

    /// Takes up to `most` deliveries out of a queue, oldest first.
    pub fn get(&self, queue: &str, most: usize) -> Vec<Delivery> {
        let path = format!("/api/queues/%2f/{}/get", escaped(queue));
        let ask = json!({"count": most, "ackmode": "ack_requeue_false", "encoding": "base64"});
        let found = self.request("POST", &path, Some(ask));
        let text = |value: &Value| value.as_str().expect("a string").to_owned();
        let delivery = |found: &Value| Delivery {
            exchange: text(&found["exchange"]),
            routing_key: text(&found["routing_key"]),
            redelivered: found["redelivered"] == true,
            payload: from_base64(&text(&found["payload"])),
            properties: found["properties"].clone(),
        };
        found.as_array().expect("a list").iter().map(delivery).collect()
    }

    /// Asks the management interface, which must agree, and returns its answer.
    #[track_caller]
    pub fn request(&self, method: &str, path: &str, body: Option<Value>) -> Value {
        let (status, answer) = self.ask(method, path, body).expect("RabbitMQ answers");
        assert!((200..300).contains(&status), "{method} {path}: {status} {answer}");
        answer
    }

    /// One HTTP/1.0 request; `None` while nobody answers.
    fn ask(&self, method: &str, path: &str, body: Option<Value>) -> Option<(u16, Value)> {
        let body = body.map_or(String::new(), |body| body.to_string());
        let mut stream = TcpStream::connect(("127.0.0.1", self.management)).ok()?;
        stream.set_read_timeout(Some(PATIENCE)).ok()?;
        // The credentials are guest:guest.
        let request = format!(
            "{method} {path} HTTP/1.0\r\nHost: 127.0.0.1\r\nAuthorization: Basic Z3Vlc3Q6Z3Vlc3Q=\r\n\
             Content-Type: application/json\r\nContent-Length: {}\r\n\r\n{body}",
            body.len()
        );
        stream.write_all(request.as_bytes()).ok()?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer).ok()?;
        let (head, body) = answer.split_once("\r\n\r\n")?;
        let status = head.split(' ').nth(1)?.parse().ok()?;
        Some((status, serde_json::from_str(body).unwrap_or(Value::Null)))
    }

    fn command(&self, program: &str) -> Command {
        let folder = self.nest.folder();
        let mut command = Command::new(self.programs.join(program));
        command
            .current_dir(folder)
            .env("HOME", folder)
            .env("RABBITMQ_NODENAME", format!("test{}@localhost", self.amqp))
            .env("RABBITMQ_CONFIG_FILE", folder.join("rabbitmq.conf"))
            .env("RABBITMQ_ENABLED_PLUGINS_FILE", folder.join("enabled_plugins"))
            .env("RABBITMQ_MNESIA_BASE", folder.join("data"))
            .env("RABBITMQ_LOG_BASE", folder.join("logs"))
            .env("RABBITMQ_DIST_PORT", self.distribution.to_string())
            .env("ERL_EPMD_PORT", self.names.to_string())
            .env("ERL_EPMD_ADDRESS", "127.0.0.1")
            .env(
                "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS",
                "+S 1:1 -start_epmd false -kernel inet_dist_use_interface {127,0,0,1}",
            );
        command
    }
}

impl Drop for Rabbit {
    fn drop(&mut self) {
        self.kill();
        let _ = self.name_server.kill();
        let _ = self.name_server.wait();
        self.nest.write("names", "");
    }
}

/// Starts a server in a process group of its own, which `ENDING` finds in a file.
fn spawn(command: &mut Command, nest: &Nest, group: &str, name: &str) -> Child {
    use std::os::unix::process::CommandExt;
    let log = nest.log();
    command.stdin(Stdio::null()).stdout(log.try_clone().expect("a handle")).stderr(log);
    let child = command.process_group(0).spawn();
    let child = child.unwrap_or_else(|_| super::missing(name, "install rabbitmq-server"));
    nest.write(group, &format!("{}\n", child.id()));
    child
}

fn kill_group(mut leader: Child) {
    let group = format!("-{}", leader.id());
    let kill =
        Command::new("kill").args(["-s", "KILL", "--", &group]).stderr(Stdio::null()).status();
    kill.expect("kill is there");
    leader.wait().expect("a child");
}

/// Debian's programs of the same names in `PATH` change the user and the home folder, so they come last.
fn find_programs() -> PathBuf {
    let places = ["/usr/lib/rabbitmq/bin", "/opt/rabbitmq/sbin"].map(PathBuf::from).to_vec();
    find(places, &["rabbitmq-server", "rabbitmqctl"])
        .unwrap_or_else(|| super::missing("RabbitMQ server", "install rabbitmq-server"))
}

fn escaped(name: &str) -> String {
    name.bytes()
        .map(|byte| {
            if byte.is_ascii_alphanumeric() {
                (byte as char).to_string()
            } else {
                format!("%{byte:02X}")
            }
        })
        .collect()
}

fn from_base64(text: &str) -> Vec<u8> {
    let value = |letter: u8| match letter {
        b'A'..=b'Z' => letter - b'A',
        b'a'..=b'z' => letter - b'a' + 26,
        b'0'..=b'9' => letter - b'0' + 52,
        b'+' => 62,
        b'/' => 63,
        other => panic!("not base64: {other}"),
    };
    let letters: Vec<u8> = text.trim_end_matches('=').bytes().map(value).collect();
    let group = |letters: &[u8]| {
        let bits =
            letters.iter().enumerate().fold(0, |bits, (i, &l)| bits | u32::from(l) << (26 - 6 * i));
        bits.to_be_bytes()[..letters.len() * 6 / 8].to_vec()
    };
    letters.chunks(4).flat_map(group).collect()
}

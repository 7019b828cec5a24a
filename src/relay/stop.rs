//! Asking a relay to stop, and how long it may take.

use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender, bounded};

/// Asks a relay to stop: it finishes the publish in progress, writes its verdicts, releases the rest and ends.
/// Cheap to clone; asking twice does no harm.
#[derive(Debug, Clone)]
pub struct StopHandle(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    asked_at: OnceLock<Instant>,
    // Dropped to wake everyone who waits on the other end; nothing is ever sent.
    sender: Mutex<Option<Sender<()>>>,
    receiver: Receiver<()>,
}

impl StopHandle {
    pub(crate) fn new() -> Self {
        let (sender, receiver) = bounded(0);
        Self(Arc::new(Inner {
            asked_at: OnceLock::new(),
            sender: Mutex::new(Some(sender)),
            receiver,
        }))
    }

    /// Asks. Returns at once.
    pub fn stop(&self) {
        self.0.asked_at.get_or_init(Instant::now);
        self.0.sender.lock().unwrap_or_else(PoisonError::into_inner).take();
    }

    /// Whether the relay was asked to stop.
    pub fn is_stopping(&self) -> bool {
        self.0.asked_at.get().is_some()
    }

    /// A channel that is closed once the relay was asked to stop, for `select!`.
    pub(crate) fn channel(&self) -> &Receiver<()> {
        &self.0.receiver
    }

    /// Waits for `time`, or less when the relay is asked to stop. True when it is.
    pub(crate) fn wait(&self, time: Duration) -> bool {
        let _ = self.0.receiver.recv_timeout(time);
        self.is_stopping()
    }

    /// When everything has to be over, once the relay was asked to stop.
    pub(crate) fn deadline(&self, shutdown_timeout: Duration) -> Option<Instant> {
        self.0.asked_at.get().map(|asked| *asked + shutdown_timeout)
    }
}

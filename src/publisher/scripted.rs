//! A broker in memory that fails on cue and remembers what it got: for tests and for the demo.

use std::collections::VecDeque;
use std::fmt;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::{Outcomes, Publisher};
use crate::event::Event;
use crate::policy::PublishError;

type Matcher = Box<dyn Fn(&Event) -> bool + Send>;
type Hook = Arc<dyn Fn(&[Event]) + Send + Sync>;

/// The broker. Clones share one memory; give each worker a [`publisher`](Self::publisher) of it.
///
/// ```
/// use pg_outbox::{Event, Outcomes, PublishError, Publisher, ScriptedBroker};
/// use std::time::{Duration, Instant};
/// let broker = ScriptedBroker::new();
/// broker.fail_next(|event| event.event_type == "placed", PublishError::transient("timeout"));
/// let wave = [Event::for_test(1, "a", "placed", b"{}")];
/// let mut publisher = broker.publisher();
/// for expected in [false, true] {
///     let mut outcomes = Outcomes::new(1);
///     publisher.publish(&wave, Instant::now() + Duration::from_secs(1), &mut outcomes);
///     assert_eq!(outcomes.get(0).unwrap().is_ok(), expected);
/// }
/// assert_eq!(broker.deliveries(), wave);
/// ```
#[derive(Clone, Default)]
pub struct ScriptedBroker(Arc<Shared>);

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    script: VecDeque<Cue>,
    down: Option<PublishError>,
    hook: Option<Hook>,
    deliveries: Vec<Event>,
    calls: usize,
    forget: bool,
    published: usize,
}

struct Cue {
    matches: Matcher,
    error: PublishError,
    times: Option<usize>,
}

impl ScriptedBroker {
    /// A broker that confirms everything.
    pub fn new() -> Self {
        Self::default()
    }

    /// A publisher that sends to this broker.
    pub fn publisher(&self) -> ScriptedPublisher {
        ScriptedPublisher(self.clone())
    }

    /// Fails the next event that matches, once. Cues are tried in the order in which they were given.
    pub fn fail_next(
        &self,
        matches: impl Fn(&Event) -> bool + Send + 'static,
        error: PublishError,
    ) {
        self.state().script.push_back(Cue { matches: Box::new(matches), error, times: Some(1) });
    }

    /// Fails every event that matches, until [`mend`](Self::mend).
    pub fn fail_always(
        &self,
        matches: impl Fn(&Event) -> bool + Send + 'static,
        error: PublishError,
    ) {
        self.state().script.push_back(Cue { matches: Box::new(matches), error, times: None });
    }

    /// Fails everything with this error until [`mend`](Self::mend), as a broker that is away does.
    pub fn take_down(&self, error: PublishError) {
        self.state().down = Some(error);
    }

    /// Forgets every cue and confirms from now on.
    pub fn mend(&self) {
        let mut state = self.state();
        state.script.clear();
        state.down = None;
    }

    /// Calls `hook` with each wave, in the publishing thread, before the broker answers. It may block or panic.
    pub fn on_publish(&self, hook: impl Fn(&[Event]) + Send + Sync + 'static) {
        self.state().hook = Some(Arc::new(hook));
    }

    /// Stops calling the hook.
    pub fn clear_hook(&self) {
        self.state().hook = None;
    }

    /// Counts confirmed events without keeping them, for long runs.
    pub fn keep_nothing(&self) {
        self.state().forget = true;
    }

    /// Every event that was confirmed, in the order of arrival, duplicates included.
    pub fn deliveries(&self) -> Vec<Event> {
        self.state().deliveries.clone()
    }

    /// How many events were confirmed, duplicates included.
    pub fn published(&self) -> usize {
        self.state().published
    }

    /// How many calls a publisher of this broker has had.
    pub fn calls(&self) -> usize {
        self.state().calls
    }

    /// Waits until at least `count` events were confirmed; false when `timeout` passes first.
    pub fn wait_for(&self, count: usize, timeout: Duration) -> bool {
        self.wait(timeout, |state| state.published >= count)
    }

    /// Waits until a publisher was called at least `count` times; false when `timeout` passes first.
    pub fn wait_for_calls(&self, count: usize, timeout: Duration) -> bool {
        self.wait(timeout, |state| state.calls >= count)
    }

    fn wait(&self, timeout: Duration, done: impl Fn(&State) -> bool) -> bool {
        let waited = self.0.changed.wait_timeout_while(self.state(), timeout, |state| !done(state));
        let (state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        done(&state)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn answer(&mut self, event: &Event) -> Result<(), PublishError> {
        if let Some(error) = &self.down {
            return Err(error.clone());
        }
        let Some(index) = self.script.iter().position(|cue| (cue.matches)(event)) else {
            self.published += 1;
            if !self.forget {
                self.deliveries.push(event.clone());
            }
            return Ok(());
        };
        let cue = &mut self.script[index];
        let error = cue.error.clone();
        if let Some(times) = &mut cue.times {
            *times -= 1;
            if *times == 0 {
                self.script.remove(index);
            }
        }
        Err(error)
    }
}

impl fmt::Debug for ScriptedBroker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ScriptedBroker")
            .field("published", &self.published())
            .finish_non_exhaustive()
    }
}

/// Sends to a [`ScriptedBroker`].
#[derive(Debug, Clone)]
pub struct ScriptedPublisher(ScriptedBroker);

impl Publisher for ScriptedPublisher {
    fn publish(&mut self, wave: &[Event], _deadline: Instant, outcomes: &mut Outcomes) {
        let hook = {
            let mut state = self.0.state();
            state.calls += 1;
            state.hook.clone()
        };
        self.0.0.changed.notify_all();
        if let Some(hook) = hook {
            hook(wave); // without the lock: it may block or panic
        }
        let mut state = self.0.state();
        for (index, event) in wave.iter().enumerate() {
            match state.answer(event) {
                Ok(()) => outcomes.published(index),
                Err(error) => outcomes.failed(index, error),
            }
        }
        drop(state);
        self.0.0.changed.notify_all();
    }

    fn check(&mut self, _deadline: Instant) -> Option<Result<(), PublishError>> {
        Some(self.0.state().down.clone().map_or(Ok(()), Err))
    }
}

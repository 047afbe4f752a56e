//! Groups: layers whose blocks a serving engine counts together, and the objects that this engine
//! makes of a block of them.

use std::ops::Range;
use std::sync::Arc;

use penstock_contract::{Block, Chunk, Key, Namespace, Parent};
use penstock_layout::{Descriptor, Span};
use penstock_value::compare::{Content, Numbers};
use penstock_value::compress::Element;
use penstock_value::header::Writer;

use crate::config::EngineConfig;
use crate::copy::Device;
use crate::job::{Plan, Transfer};
use crate::outcome::Part;
use crate::region::Region;
use crate::registration::Registration;
use crate::{EngineError, Owner};

/// Which part of a group of layers lies in this engine's memory, and where.
#[derive(Clone, Debug)]
pub struct KvGroup {
    /// Where the memory is.
    pub device: Device,
    /// How it is laid out.
    pub descriptor: Descriptor,
    /// The memory: one region for each region of the descriptor.
    pub regions: Vec<Region>,
    /// The objects that a block is stored as: parts of the descriptor's share.
    pub spans: Vec<Span>,
    /// The serving engine's block is so many blocks of the descriptor, its pages. They follow one
    /// another.
    pub pages_per_block: u64,
    /// Who stores which blocks.
    pub replica: Replica,
    /// The type of the numbers that the memory holds, if it holds no others and there is a coder for
    /// it. If the engine compresses values, those of this group are coded.
    pub element: Option<Element>,
    /// The type of the numbers that the memory holds, for comparisons: None if it is not known, or if
    /// there are several. Such payloads are not compared.
    pub numbers: Option<Numbers>,
    /// Whether the layer of index 0 reads embeddings of tokens alone, see [`Content::is_first`].
    pub reads_tokens: bool,
    /// Whether the model routes tokens to experts, see [`Content::routes`].
    pub routes: bool,
}

impl KvGroup {
    /// A group with one page for each block, stored as one object, and no replicas.
    pub fn new(device: Device, descriptor: Descriptor, regions: Vec<Region>) -> Self {
        Self {
            spans: vec![descriptor.share()],
            device,
            descriptor,
            regions,
            pages_per_block: 1,
            replica: Replica::default(),
            element: None,
            numbers: None,
            reads_tokens: false,
            routes: false,
        }
    }
}

/// One of `count` engines that hold the same. Each of them stores its part of the blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Replica {
    /// The number of this engine, below `count`.
    pub index: u8,
    /// The number of engines, at least one.
    pub count: u8,
}

impl Default for Replica {
    fn default() -> Self {
        Self { index: 0, count: 1 }
    }
}

impl Replica {
    /// Whether this engine stores a block. Hashes are evenly distributed in every byte, and shorter
    /// hashes are padded at the end.
    fn stores(self, chunk: &Chunk) -> bool {
        chunk[0] % self.count == self.index
    }
}

/// What a job does with blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Work {
    Store,
    Load,
    Prefetch,
}

/// A group as registered.
pub(crate) struct Group {
    number: u16,
    /// What this engine holds of the group; None if it holds nothing.
    held: Option<Held>,
    namespace: Option<Namespace>,
}

struct Held {
    registration: Arc<Registration>,
    /// The objects that make up a block, and their payload bytes.
    objects: Vec<(Span, usize)>,
    pages_per_block: u64,
    replica: Replica,
    /// The coder of its values, if they are to be coded.
    element: Option<Element>,
    /// The type of the numbers of its values, if it is known.
    numbers: Option<Numbers>,
    /// The layers.
    layers: Vec<u16>,
    reads_tokens: bool,
    routes: bool,
}

impl Group {
    /// A group that this engine holds. Checks that its objects have layers of the group and fit
    /// the engine's slots.
    pub(crate) fn new(
        number: u16,
        group: KvGroup,
        config: &EngineConfig,
    ) -> Result<Self, EngineError> {
        let Replica { index, count } = group.replica;
        if index >= count {
            return Err(EngineError::Config(
                "a replica's index must be less than the number of replicas",
            ));
        }
        if group.pages_per_block == 0 || group.spans.is_empty() {
            return Err(EngineError::Config(
                "a block of a group needs at least one page and one object",
            ));
        }
        let executor = group.device.executor()?;
        let layers = group.descriptor.layers().collect();
        let registration = Registration::new(group.descriptor, group.regions, executor)?;
        let objects = group
            .spans
            .iter()
            .map(|span| {
                let room = config.slot_bytes;
                let bytes = registration.payload_bytes(span, group.pages_per_block, room)?;
                Ok((*span, bytes))
            })
            .collect::<Result<_, EngineError>>()?;
        let held = Held {
            registration: Arc::new(registration),
            objects,
            pages_per_block: group.pages_per_block,
            replica: group.replica,
            element: group.element.filter(|_| config.compress),
            numbers: group.numbers,
            layers,
            reads_tokens: group.reads_tokens,
            routes: group.routes,
        };
        Ok(Self {
            number,
            held: Some(held),
            namespace: None,
        })
    }

    /// A group of which this engine holds nothing.
    pub(crate) fn elsewhere(number: u16) -> Self {
        Self {
            number,
            held: None,
            namespace: None,
        }
    }

    /// Gives the group its namespace, for jobs from now on. Returns the one that it had, if that was
    /// another.
    pub(crate) fn name(&mut self, namespace: Namespace) -> Option<Namespace> {
        let before = self.namespace.replace(namespace);
        before.filter(|&before| before != namespace)
    }

    /// The group's namespace, if it has one.
    pub(crate) fn namespace(&self) -> Option<Namespace> {
        self.namespace
    }

    pub(crate) fn number(&self) -> u16 {
        self.number
    }

    /// The number of objects that make up a block.
    pub(crate) fn objects(&self) -> usize {
        self.held.as_ref().map_or(0, |held| held.objects.len())
    }

    pub(crate) fn registration(&self) -> Option<&Arc<Registration>> {
        self.held.as_ref().map(|held| &held.registration)
    }

    /// Adds to a job's plan what the job is to do with a block.
    pub(crate) fn plan(
        &self,
        block: &Block,
        work: Work,
        owner: &Owner,
        writer: Writer,
        plan: &mut Plan,
    ) -> Result<(), EngineError> {
        let Some(shared) = self.namespace else {
            return Err(EngineError::Refused(format!(
                "group {} has no namespace: name it before its first job",
                self.number
            )));
        };
        let namespace = owner.namespace(shared);
        let mut bytes = 0;
        if let Some(held) = &self.held {
            bytes = held.objects.iter().map(|(_, bytes)| *bytes as u64).sum();
            let pages = held.pages(block.id, work)?;
            if work != Work::Store || held.replica.stores(&block.chunk) {
                plan.objects
                    .extend(held.objects.iter().map(|&(span, bytes)| {
                        let key = |chunk| Key {
                            namespace,
                            chunk,
                            span,
                        };
                        Transfer {
                            registration: Arc::clone(&held.registration),
                            key: key(block.chunk),
                            parent: block.parent.map(|Parent { chunk, .. }| key(chunk)),
                            position: block.parent.map_or(0, |parent| parent.tokens),
                            pages: pages.clone(),
                            context: Arc::clone(&owner.salt),
                            bytes,
                            element: held.element,
                            content: held.content(&span),
                            writer,
                        }
                    }));
            }
        }
        plan.parts.push(Part {
            end: plan.objects.len(),
            bytes,
        });
        Ok(())
    }
}

impl Held {
    /// What the payloads of a span consist of.
    fn content(&self, span: &Span) -> Content {
        let covered = span.layers();
        let layers = (self.layers.iter()).filter(|&layer| covered.contains(layer));
        Content {
            numbers: self.numbers,
            pages: self.pages_per_block as usize,
            layers: layers.count(),
            is_first: self.reads_tokens && covered.start == 0 && self.layers.first() == Some(&0),
            routes: self.routes,
        }
    }

    /// The pages of a block. Checks that they exist, unless the work is a prefetch.
    fn pages(&self, block: u64, work: Work) -> Result<Range<u64>, EngineError> {
        let count = self.pages_per_block;
        if work == Work::Prefetch {
            return Ok(0..count);
        }
        let start = block.saturating_mul(count);
        let end = start.saturating_add(count);
        self.registration.check_page(end - 1)?;
        Ok(start..end)
    }
}

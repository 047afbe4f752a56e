//! Doubly linked queues over one slab: constant-time push, pop and removal from the middle.

const NIL: u32 = u32::MAX;

struct Node<T> {
    prev: u32,
    next: u32,
    /// What the node holds; None while it is on the free list.
    item: Option<T>,
}

/// The nodes of any number of [`Queue`]s. An index stays valid until its node is freed.
pub(crate) struct Slab<T> {
    nodes: Vec<Node<T>>,
    free: u32,
}

/// One queue through a slab. A node is in at most one queue, and the caller knows which.
pub(crate) struct Queue {
    head: u32,
    tail: u32,
    len: usize,
}

impl<T> Slab<T> {
    pub(crate) const fn new() -> Self {
        Self {
            nodes: Vec::new(),
            free: NIL,
        }
    }

    /// Stores an item that is in no queue yet.
    pub(crate) fn alloc(&mut self, item: T) -> u32 {
        let node = Node {
            prev: NIL,
            next: NIL,
            item: Some(item),
        };
        if self.free == NIL {
            let index = u32::try_from(self.nodes.len())
                .ok()
                .filter(|&index| index != NIL);
            self.nodes.push(node);
            index.expect("fewer than 2^32 - 1 entries")
        } else {
            let index = self.free;
            self.free = self.nodes[index as usize].next;
            self.nodes[index as usize] = node;
            index
        }
    }

    /// Frees a node that is in no queue.
    pub(crate) fn free(&mut self, index: u32) -> T {
        let node = &mut self.nodes[index as usize];
        let item = node.item.take().expect("a live node");
        node.next = self.free;
        self.free = index;
        item
    }

    /// The item of a node that may have been freed.
    pub(crate) fn find(&self, index: u32) -> Option<&T> {
        self.nodes[index as usize].item.as_ref()
    }

    pub(crate) fn get(&self, index: u32) -> &T {
        self.nodes[index as usize]
            .item
            .as_ref()
            .expect("a live node")
    }

    pub(crate) fn get_mut(&mut self, index: u32) -> &mut T {
        self.nodes[index as usize]
            .item
            .as_mut()
            .expect("a live node")
    }
}

impl Queue {
    pub(crate) const fn new() -> Self {
        Self {
            head: NIL,
            tail: NIL,
            len: 0,
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// The oldest node.
    pub(crate) fn front(&self) -> Option<u32> {
        (self.head != NIL).then_some(self.head)
    }

    /// The node that is one younger than a node in a queue.
    pub(crate) fn next<T>(slab: &Slab<T>, index: u32) -> Option<u32> {
        let next = slab.nodes[index as usize].next;
        (next != NIL).then_some(next)
    }

    /// Adds a node as the oldest.
    pub(crate) fn push_front<T>(&mut self, slab: &mut Slab<T>, index: u32) {
        let node = &mut slab.nodes[index as usize];
        node.prev = NIL;
        node.next = self.head;
        match self.head {
            NIL => self.tail = index,
            head => slab.nodes[head as usize].prev = index,
        }
        self.head = index;
        self.len += 1;
    }

    /// Adds a node as the youngest.
    pub(crate) fn push_back<T>(&mut self, slab: &mut Slab<T>, index: u32) {
        let node = &mut slab.nodes[index as usize];
        node.prev = self.tail;
        node.next = NIL;
        match self.tail {
            NIL => self.head = index,
            tail => slab.nodes[tail as usize].next = index,
        }
        self.tail = index;
        self.len += 1;
    }

    /// Takes a node of this queue out of it.
    pub(crate) fn unlink<T>(&mut self, slab: &mut Slab<T>, index: u32) {
        let (prev, next) = {
            let node = &slab.nodes[index as usize];
            (node.prev, node.next)
        };
        match prev {
            NIL => self.head = next,
            prev => slab.nodes[prev as usize].next = next,
        }
        match next {
            NIL => self.tail = prev,
            next => slab.nodes[next as usize].prev = prev,
        }
        self.len -= 1;
    }
}

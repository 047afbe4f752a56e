//! A cluster of real servers on loopback.

use penstock_contract::testing::eventually;

use super::{FREE_PORT, Server};

/// Slots in every cluster.
const SLOTS: usize = 16384;

/// For so long the nodes wait for one that is silent. No machine is so busy that one seems dead.
const PATIENCE_MS: u64 = 20_000;

/// Primaries with equal shares of the slots, and one replica each if there are any.
pub(crate) struct Cluster {
    pub(crate) primaries: Vec<Server>,
    pub(crate) replicas: Vec<Server>,
}

impl Cluster {
    pub(crate) fn start(name: &'static str, primaries: usize, with_replicas: bool) -> Self {
        let start = |_| {
            let patience = PATIENCE_MS.to_string();
            let options = [
                "--cluster-enabled",
                "yes",
                "--cluster-node-timeout",
                &patience,
            ];
            // As a cache wants it: what lies on a silent node is missing, and nothing else.
            let partial = ["--cluster-require-full-coverage", "no"];
            let more = [
                "--cluster-port",
                FREE_PORT,
                "--cluster-replica-validity-factor",
                "0",
            ];
            Server::start_with(name, &[&options[..], &partial[..], &more[..]].concat())
        };
        let count = if with_replicas { primaries } else { 0 };
        let cluster = Self {
            primaries: (0..primaries).map(start).collect(),
            replicas: (0..count).map(start).collect(),
        };
        for (i, server) in cluster.primaries.iter().enumerate() {
            let (first, next) = (SLOTS * i / primaries, SLOTS * (i + 1) / primaries);
            let reply = server.command(&format!("CLUSTER ADDSLOTSRANGE {first} {}", next - 1));
            assert_eq!(reply, "+OK");
        }
        // Nodes of one epoch would settle among themselves whose slots are whose, and answer
        // differently meanwhile.
        for (server, epoch) in cluster.servers().zip(1..) {
            let reply = server.command(&format!("CLUSTER SET-CONFIG-EPOCH {epoch}"));
            assert_eq!(reply, "+OK");
        }
        let first = &cluster.primaries[0];
        for server in cluster.servers().skip(1) {
            let reply = first.command(&format!(
                "CLUSTER MEET 127.0.0.1 {} {}",
                server.port(),
                server.option("--cluster-port")
            ));
            assert_eq!(reply, "+OK");
        }
        eventually("all know each other", || {
            let known = format!("cluster_known_nodes:{}", primaries + count);
            cluster
                .servers()
                .all(|server| server.text("CLUSTER INFO").contains(&known))
        });
        for (primary, replica) in cluster.primaries.iter().zip(&cluster.replicas) {
            let order = format!("CLUSTER REPLICATE {}", primary.text("CLUSTER MYID"));
            eventually("a replica joins", || replica.command(&order) == "+OK");
        }
        eventually("it serves", || {
            cluster.servers().all(|server| {
                let info = server.text("CLUSTER INFO");
                // A node may say that all is well before it has heard whose the slots are.
                info.contains("cluster_state:ok")
                    && info.contains(&format!("cluster_slots_assigned:{SLOTS}"))
                    && server.text("CLUSTER NODES").matches("slave").count() == count
            }) && cluster.replicas.iter().all(|replica| {
                replica
                    .text("INFO replication")
                    .contains("master_link_status:up")
            }) && cluster.servers().all(can_start_again)
        });
        cluster
    }

    pub(crate) fn servers(&self) -> impl Iterator<Item = &Server> {
        self.primaries.iter().chain(&self.replicas)
    }

    /// Has the nodes take one for dead after so long, and replace it if it has a replica.
    fn wait_for_silent_nodes(&self, milliseconds: u64) {
        let order = format!("CONFIG SET cluster-node-timeout {milliseconds}");
        for server in self.servers().filter(|server| server.is_running()) {
            assert_eq!(server.command(&order), "+OK");
        }
    }

    /// Has the nodes replace a primary that is gone. Returns once `is_replaced`. Before and after
    /// that, however slow they are, they replace none.
    pub(crate) fn replace_the_dead(&self, is_replaced: impl FnOnce()) {
        self.wait_for_silent_nodes(1000);
        is_replaced();
        self.wait_for_silent_nodes(PATIENCE_MS);
    }

    /// By its first primary.
    pub(crate) fn url(&self) -> String {
        format!("redis+cluster://127.0.0.1:{}", self.primaries[0].port())
    }

    /// Moves a slot with all that lies in it, as `redis-cli --cluster reshard` does, calling
    /// `meanwhile` after each step.
    pub(crate) fn move_slot(&self, slot: usize, from: usize, to: usize, meanwhile: impl Fn()) {
        let (source, target) = (&self.primaries[from], &self.primaries[to]);
        let (source_id, target_id) = (source.text("CLUSTER MYID"), target.text("CLUSTER MYID"));
        let order = |server: &Server, order: String| assert_eq!(server.command(&order), "+OK");
        order(
            target,
            format!("CLUSTER SETSLOT {slot} IMPORTING {source_id}"),
        );
        order(
            source,
            format!("CLUSTER SETSLOT {slot} MIGRATING {target_id}"),
        );
        meanwhile();
        for key in source.texts(&format!("CLUSTER GETKEYSINSLOT {slot} 1000")) {
            let order = format!("MIGRATE 127.0.0.1 {} {key} 0 120000", target.port());
            let reply = source.command(&order);
            // Somebody may have removed it since.
            assert!(["+OK", "+NOKEY"].contains(&&*reply), "{reply}");
            meanwhile();
        }
        order(target, format!("CLUSTER SETSLOT {slot} NODE {target_id}"));
        meanwhile();
        order(source, format!("CLUSTER SETSLOT {slot} NODE {target_id}"));
        meanwhile();
    }
}

/// Whether the server would take its own file of the cluster's nodes, killed as it is now. Valkey 8
/// takes none in which a replica's shard differs from its primary's, as it does for a moment after
/// the replica has joined.
fn can_start_again(server: &Server) -> bool {
    let text = std::fs::read_to_string(server.directory.path().join("nodes.conf"))
        .expect("a node of a cluster keeps this file");
    let nodes: Vec<Vec<&str>> = text
        .lines()
        .map(|line| line.split(' ').collect())
        .filter(|words: &Vec<&str>| words.len() >= 8)
        .collect();
    // Redis 7.0 knows no shards: there is nothing that could differ.
    let shard = |words: &[&str]| {
        let fields = words[1].split(',');
        fields
            .filter_map(|field| field.strip_prefix("shard-id="))
            .next()
            .map(str::to_owned)
    };
    nodes.iter().all(|words| {
        let primary = nodes.iter().find(|other| other[0] == words[3]);
        primary.is_none_or(|primary| shard(primary) == shard(words))
    })
}

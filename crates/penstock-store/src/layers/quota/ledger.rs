//! The books: what each account has in the pool, as far as this handle knows.
//!
//! An account's *use* is what the last census found, plus all that this handle has put since that
//! census began. This handle alone can therefore never be over: what it knows is never less than
//! what there is. What other handles put meanwhile it does not know. So each handle puts no more
//! than a twentieth of the quota (or one value) between two censuses.
//!
//! With `k` handles the pool never has more of an account than its quota and `k - 1` twentieths.
//! Take the last census after which its handle put anything, and the moment of its beginning. Until
//! now, that handle has kept what was found then and its own puts within the quota. Each other
//! handle has put, since then, at most what it may put after one census of its own.

use std::collections::HashMap;

use super::rules::{Account, Quotas};

/// What an account may put between two censuses, as a part of its quota.
const UNSEEN_PART: u64 = 20;
/// A census is asked for when an account has put half of that.
const CENSUS_PART: u64 = 2 * UNSEEN_PART;

/// An account's use, in bytes that the store charges.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Standing {
    pub(super) quota: u64,
    /// What the last census found, less what was evicted since.
    found: u64,
    /// Put between the beginning of the last census and that of the one under way.
    before: u64,
    /// Put since the beginning of the census under way, or of the last one.
    after: u64,
    /// Being put now.
    pending: u64,
    /// The largest value that was not let in since the last census.
    wanted: u64,
}

/// Why a value is not let in now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Refusal {
    /// The value alone is more than the quota.
    TooLarge,
    /// There is no room before something is evicted.
    NoRoom,
    /// A census has to come first.
    NotCounted,
}

impl Standing {
    fn new(quota: u64) -> Self {
        Self {
            quota,
            ..Self::default()
        }
    }

    fn unseen(&self) -> u64 {
        self.before + self.after + self.pending
    }

    /// The most that the account can have, apart from what other handles put.
    pub(super) fn used(&self) -> u64 {
        self.found + self.unseen()
    }

    fn refusal(&self, charge: u64) -> Option<Refusal> {
        let unseen = self.unseen();
        if charge > self.quota {
            Some(Refusal::TooLarge)
        } else if charge > self.quota.saturating_sub(self.used()) {
            Some(Refusal::NoRoom)
        } else if unseen > 0 && unseen + charge > self.quota / UNSEEN_PART {
            Some(Refusal::NotCounted)
        } else {
            None
        }
    }

    fn needs_a_census(&self) -> bool {
        self.wanted > 0 || self.is_nearly_full() || self.unseen() > self.quota / CENSUS_PART
    }

    fn is_nearly_full(&self) -> bool {
        self.used() > self.quota - self.quota / 20
    }

    /// What has to be evicted, so that some room is left or a value that found none has it. This
    /// counts only what the census found: what was put meanwhile may be the same values again.
    fn excess(&self) -> u64 {
        let left = self.quota.saturating_sub(self.found);
        if left >= self.wanted.max(self.quota / 20) {
            return 0;
        }
        let room = self.wanted.max(self.quota / 10);
        self.found.saturating_sub(self.quota.saturating_sub(room))
    }
}

/// The standings of all accounts that have a quota.
#[derive(Debug)]
pub(super) struct Ledger {
    standings: HashMap<Account, Standing>,
    /// Censuses that were taken.
    pub(super) censuses: u64,
}

impl Ledger {
    pub(super) fn new(quotas: &Quotas) -> Self {
        let standing = |(account, quota)| (account, Standing::new(quota));
        Self {
            standings: quotas.own().map(standing).collect(),
            censuses: 0,
        }
    }

    /// Takes room for a value in all its accounts, or in none.
    pub(super) fn take(
        &mut self,
        accounts: impl Iterator<Item = (Account, u64)> + Clone,
        charge: u64,
    ) -> Result<(), (Account, u64, Refusal)> {
        if self.censuses == 0
            && let Some((account, quota)) = accounts.clone().next()
        {
            return Err((account, quota, Refusal::NotCounted));
        }
        for (account, quota) in accounts.clone() {
            let standing = self.standing(account, quota);
            if let Some(refusal) = standing.refusal(charge) {
                if refusal != Refusal::TooLarge {
                    standing.wanted = standing.wanted.max(charge);
                }
                return Err((account, quota, refusal));
            }
        }
        for (account, quota) in accounts {
            self.standing(account, quota).pending += charge;
        }
        Ok(())
    }

    /// Ends a put that took room: whether its value may be in the store now.
    pub(super) fn end_put(
        &mut self,
        accounts: impl Iterator<Item = (Account, u64)>,
        charge: u64,
        may_be_there: bool,
    ) {
        for (account, quota) in accounts {
            let standing = self.standing(account, quota);
            standing.pending -= charge;
            if may_be_there {
                standing.after += charge;
            }
        }
    }

    /// Whether a census would be of use now.
    pub(super) fn needs_a_census(&self) -> bool {
        self.censuses == 0 || self.standings.values().any(Standing::needs_a_census)
    }

    /// A census begins: it may or may not see what is put from now on.
    pub(super) fn begin_census(&mut self) {
        for standing in self.standings.values_mut() {
            standing.before += std::mem::take(&mut standing.after);
        }
    }

    /// A census is over. Returns what has to be evicted, of each account that has too much.
    pub(super) fn end_census(
        &mut self,
        quotas: &Quotas,
        found: &HashMap<Account, (u64, u64)>,
    ) -> HashMap<Account, u64> {
        self.censuses += 1;
        for standing in self.standings.values_mut() {
            (standing.found, standing.before) = (0, 0);
        }
        for (&account, &(quota, bytes)) in found {
            self.standing(account, quota).found = bytes;
        }
        let mut excess = HashMap::new();
        for (&account, standing) in &mut self.standings {
            excess.insert(account, standing.excess());
            standing.wanted = 0;
        }
        excess.retain(|_, bytes| *bytes > 0);
        let own: HashMap<Account, u64> = quotas.own().collect();
        self.standings
            .retain(|account, standing| standing.used() > 0 || own.contains_key(account));
        excess
    }

    /// A value that the last census found is not there any more.
    pub(super) fn is_gone(&mut self, accounts: impl Iterator<Item = (Account, u64)>, charge: u64) {
        for (account, quota) in accounts {
            let standing = self.standing(account, quota);
            standing.found = standing.found.saturating_sub(charge);
        }
    }

    /// All standings, in the order of their accounts.
    pub(super) fn all(&self) -> Vec<(Account, Standing)> {
        let mut all: Vec<_> = self.standings.iter().map(|(&a, &s)| (a, s)).collect();
        all.sort_unstable_by_key(|(account, _)| *account);
        all
    }

    fn standing(&mut self, account: Account, quota: u64) -> &mut Standing {
        let entry = self.standings.entry(account);
        entry.or_insert_with(|| Standing::new(quota))
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use penstock_contract::{Namespace, Tenancy, Tenant};
    use proptest::prelude::*;

    use super::*;

    const QUOTA: u64 = 1000;

    /// What one handle has under way.
    struct Handle {
        ledger: Ledger,
        /// Values that it is putting.
        puts: Vec<u64>,
        /// What was there when its census began.
        census: Option<Vec<u64>>,
    }

    #[derive(Clone, Debug)]
    enum Step {
        Begin(u64),
        End {
            which: usize,
            is_stored: bool,
        },
        BeginCensus,
        /// The census also finds some of what came after its beginning.
        EndCensus {
            sees: bool,
        },
        /// The store evicts something by itself.
        Lose(usize),
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            4 => (1..=120_u64).prop_map(Step::Begin),
            1 => Just(Step::Begin(QUOTA + 1)),
            4 => (0..8_usize, prop::bool::weighted(0.9))
                .prop_map(|(which, is_stored)| Step::End { which, is_stored }),
            2 => Just(Step::BeginCensus),
            2 => any::<bool>().prop_map(|sees| Step::EndCensus { sees }),
            1 => (0..30_usize).prop_map(Step::Lose),
        ]
    }

    proptest! {
        /// However puts and censuses of several handles fall between one another.
        #[test]
        fn an_account_is_never_over_by_more_than_is_said(
            handles in 1..4_usize,
            steps in prop::collection::vec((0..4_usize, step()), 1..400),
        ) {
            let red = Namespace([1; 16]).of_tenant(Tenant::named("red").unwrap());
            let mut quotas = Quotas::default();
            quotas.add(&format!("tenant/*:{QUOTA}")).unwrap();
            let mut handles: Vec<Handle> = (0..handles)
                .map(|_| Handle { ledger: Ledger::new(&quotas), puts: Vec::new(), census: None })
                .collect();
            // By number, what each value is charged with.
            let (mut there, mut charges) = (BTreeMap::new(), Vec::new());
            let mut largest = 0;
            let others = handles.len() as u64 - 1;
            for (whose, step) in steps {
                let whose = whose % handles.len();
                let Handle { ledger, puts, census } = &mut handles[whose];
                match step {
                    Step::Begin(charge) => {
                        let taken = ledger.take(quotas.accounts_of(red), charge);
                        prop_assert!(taken.is_err() || charge <= QUOTA);
                        if taken.is_ok() {
                            puts.push(charges.len() as u64);
                            charges.push(charge);
                            largest = largest.max(charge);
                        } else {
                            prop_assert!(charge > QUOTA || ledger.needs_a_census());
                        }
                    }
                    Step::End { which, is_stored } if !puts.is_empty() => {
                        let value = puts.swap_remove(which % puts.len());
                        let charge = charges[value as usize];
                        if is_stored {
                            there.insert(value, charge);
                        }
                        ledger.end_put(quotas.accounts_of(red), charge, is_stored);
                    }
                    Step::BeginCensus => {
                        ledger.begin_census();
                        *census = Some(there.keys().copied().collect());
                    }
                    Step::EndCensus { sees } => {
                        let Some(begun) = census.take() else { continue };
                        let seen: Vec<u64> = there
                            .keys()
                            .copied()
                            .filter(|value| sees || begun.contains(value))
                            .collect();
                        let bytes = seen.iter().map(|&value| charges[value as usize]).sum();
                        let found = quotas.accounts_of(red).map(|(a, quota)| (a, (quota, bytes)));
                        let excess = ledger.end_census(&quotas, &found.collect());
                        let mut left = excess.into_values().sum::<u64>();
                        for value in seen {
                            if left == 0 {
                                break;
                            }
                            there.remove(&value);
                            left = left.saturating_sub(charges[value as usize]);
                            ledger.is_gone(quotas.accounts_of(red), charges[value as usize]);
                        }
                    }
                    Step::Lose(which) => {
                        let value = there.keys().nth(which).copied();
                        value.map(|value| there.remove(&value));
                    }
                    Step::End { .. } => {}
                }
                let used: u64 = there.values().sum();
                let unseen = largest.max(QUOTA / UNSEEN_PART);
                prop_assert!(used <= QUOTA + others * unseen, "{used}");
            }
        }
    }

    #[test]
    fn what_is_counted_twice_is_counted_once_by_the_next_census() {
        let red = Namespace([1; 16]);
        let mut quotas = Quotas::default();
        quotas.add(&format!("namespace/{red}:{QUOTA}")).unwrap();
        let accounts = || quotas.accounts_of(red);
        let mut ledger = Ledger::new(&quotas);
        let first = ledger.take(accounts(), 10);
        assert!(matches!(first, Err((_, QUOTA, Refusal::NotCounted))));
        let census = |ledger: &mut Ledger, bytes| {
            let found = accounts().map(|(account, quota)| (account, (quota, bytes)));
            ledger.end_census(&quotas, &found.collect())
        };
        ledger.begin_census();
        assert!(census(&mut ledger, 0).is_empty());
        let used = |ledger: &Ledger| ledger.all()[0].1.used();
        ledger.take(accounts(), 40).unwrap();
        ledger.begin_census();
        ledger.end_put(accounts(), 40, true);
        // The census saw it. It might not have.
        assert!(census(&mut ledger, 40).is_empty());
        assert_eq!(used(&ledger), 80);
        ledger.begin_census();
        assert!(census(&mut ledger, 40).is_empty());
        assert_eq!(used(&ledger), 40);
        // That is no reason to evict it.
        ledger.take(accounts(), 600).unwrap();
        ledger.begin_census();
        ledger.end_put(accounts(), 600, true);
        assert!(census(&mut ledger, 640).is_empty());
        assert_eq!(used(&ledger), 1240);
        // More than 95 %: down to 90 %.
        for (found, excess) in [(640, None), (950, None), (951, Some(51)), (1200, Some(300))] {
            ledger.begin_census();
            assert_eq!(census(&mut ledger, found).into_values().next(), excess);
        }
    }
}

//! An interpreter of the PTX in which the kernels here are written. It knows their few
//! instructions, runs one thread after another, and checks every access to memory.
//!
//! The meaning of an instruction is what the PTX manual says. An unknown instruction is refused.
//! The interpreter shows that a kernel's text does what it should, not that a device runs it.

use std::collections::HashMap;

/// Memory as kernels see it. An error is CUDA's number of it.
pub trait Memory {
    /// Reads 1, 2, 4, 8 or 16 bytes, the lowest first.
    fn load(&mut self, address: u64, bytes: usize) -> Result<u128, i32>;
    /// Writes 1, 2, 4, 8 or 16 bytes, the lowest first.
    fn store(&mut self, address: u64, bytes: usize, value: u128) -> Result<(), i32>;
}

const MISALIGNED_ADDRESS: i32 = 716;
const LAUNCH_TIMEOUT: i32 = 702;
/// Instructions of one thread.
const LONGEST: usize = 50_000_000;

#[derive(Clone, Copy, Debug)]
enum Operand {
    Register(usize),
    Value(u64),
    /// Special registers: `tid.x`, `ntid.x`, `ctaid.x`, `nctaid.x`.
    Special(usize),
}

/// Arithmetic of up to three sources.
#[derive(Clone, Copy, Debug)]
enum Function {
    Copy,
    Add,
    Sub,
    MulLow,
    MulWide,
    MadLow,
    And,
    Or,
    ShiftLeft,
    ShiftRight,
    Select,
    IsNotEqual,
    IsAtLeast,
}

#[derive(Clone, Debug)]
enum Action {
    /// Target, sources, bits of the result.
    Compute(Function, usize, Vec<Operand>, u32),
    LoadParameter(usize, usize),
    /// Registers, address, offset, bytes of each.
    Load(Vec<usize>, Operand, u64, usize),
    Store(Vec<usize>, Operand, u64, usize),
    Branch(usize),
    Return,
}

#[derive(Clone, Debug)]
struct Instruction {
    /// Only if the register is not zero.
    guard: Option<usize>,
    action: Action,
}

/// A kernel that was read.
#[derive(Clone, Debug)]
pub struct Program {
    /// Bytes of each parameter.
    pub parameters: Vec<usize>,
    instructions: Vec<Instruction>,
    registers: usize,
}

/// Grid and block of a launch, in one dimension.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    /// Blocks of threads.
    pub blocks: u32,
    /// Threads of each.
    pub threads: u32,
}

impl Program {
    /// Reads the entry `name` of a module's text.
    pub fn read(text: &str, name: &str) -> Result<Self, String> {
        let text: String = text
            .lines()
            .map(|line| line.split("//").next().unwrap_or_default())
            .collect::<Vec<_>>()
            .join("\n");
        let entry = text
            .split_once(&format!(".entry {name}"))
            .ok_or_else(|| format!("no entry {name}"))?
            .1;
        let (header, body) = entry.split_once('{').ok_or("no body")?;
        let (body, _) = body.rsplit_once('}').ok_or("no end")?;
        let mut reader = Reader::default();
        reader.parameters(header)?;
        reader.body(body)?;
        reader.finish()
    }

    /// Runs all threads, in an order made from `seed`. Parameters are their values.
    pub fn run(
        &self,
        shape: Shape,
        parameters: &[u64],
        memory: &mut impl Memory,
        seed: u64,
    ) -> Result<(), i32> {
        let count = u64::from(shape.blocks) * u64::from(shape.threads);
        // Any odd number steps through all of a power of two.
        let (round, step) = (count.next_power_of_two(), seed | 1);
        for turn in 0..round {
            let index = turn.wrapping_mul(step).wrapping_add(seed) % round;
            if index < count {
                let (block, thread) = (
                    index / u64::from(shape.threads),
                    index % u64::from(shape.threads),
                );
                let special = [thread, shape.threads.into(), block, shape.blocks.into()];
                self.thread(special, parameters, memory)?;
            }
        }
        Ok(())
    }

    fn thread(
        &self,
        special: [u64; 4],
        parameters: &[u64],
        memory: &mut impl Memory,
    ) -> Result<(), i32> {
        let mut registers = vec![0_u64; self.registers];
        let mut at = 0;
        for _ in 0..LONGEST {
            let instruction = &self.instructions[at];
            at += 1;
            if instruction.guard.is_some_and(|guard| registers[guard] == 0) {
                continue;
            }
            let value = |operand: &Operand| match *operand {
                Operand::Register(register) => registers[register],
                Operand::Value(value) => value,
                Operand::Special(which) => special[which],
            };
            match &instruction.action {
                Action::Return => return Ok(()),
                Action::Branch(target) => at = *target,
                Action::LoadParameter(to, index) => registers[*to] = parameters[*index],
                Action::Compute(function, to, sources, bits) => {
                    let sources: [u64; 3] =
                        std::array::from_fn(|i| sources.get(i).map_or(0, &value));
                    registers[*to] = compute(*function, sources, *bits);
                }
                Action::Load(to, address, offset, bytes) => {
                    let all = to.len() * bytes;
                    let mut read = memory.load(aligned(value(address) + offset, all)?, all)?;
                    for &register in to {
                        registers[register] = low(read, *bytes);
                        read = read.unbounded_shr(8 * *bytes as u32);
                    }
                }
                Action::Store(from, address, offset, bytes) => {
                    let all = from.len() * bytes;
                    let mut written = 0;
                    for &register in from.iter().rev() {
                        let value = low(registers[register].into(), *bytes);
                        written = written << (8 * bytes) | u128::from(value);
                    }
                    memory.store(aligned(value(address) + offset, all)?, all, written)?;
                }
            }
        }
        Err(LAUNCH_TIMEOUT)
    }
}

fn aligned(address: u64, bytes: usize) -> Result<u64, i32> {
    if address.is_multiple_of(bytes as u64) {
        Ok(address)
    } else {
        Err(MISALIGNED_ADDRESS)
    }
}

/// The lowest bytes, eight at most.
fn low(value: u128, bytes: usize) -> u64 {
    value as u64 & (u64::MAX >> (64 - 8 * bytes))
}

fn compute(function: Function, [a, b, c]: [u64; 3], bits: u32) -> u64 {
    let result = match function {
        Function::Copy => a,
        Function::Add => a.wrapping_add(b),
        Function::Sub => a.wrapping_sub(b),
        Function::MulLow | Function::MulWide => a.wrapping_mul(b),
        Function::MadLow => a.wrapping_mul(b).wrapping_add(c),
        Function::And => a & b,
        Function::Or => a | b,
        // Past the width nothing is left.
        Function::ShiftLeft if b >= u64::from(bits) => 0,
        Function::ShiftRight if b >= u64::from(bits) => 0,
        Function::ShiftLeft => a << b,
        Function::ShiftRight => a >> b,
        Function::Select => [b, a][usize::from(c != 0)],
        Function::IsNotEqual => u64::from(a != b),
        Function::IsAtLeast => u64::from(a >= b),
    };
    if bits == 64 {
        result
    } else {
        result & ((1 << bits) - 1)
    }
}

#[derive(Default)]
struct Reader {
    parameters: Vec<(String, usize)>,
    /// Number and bits of each.
    registers: HashMap<String, (usize, u32)>,
    labels: HashMap<String, usize>,
    branches: Vec<(usize, String)>,
    instructions: Vec<Instruction>,
}

impl Reader {
    fn parameters(&mut self, header: &str) -> Result<(), String> {
        let list = header
            .trim()
            .strip_prefix('(')
            .and_then(|rest| rest.strip_suffix(')'))
            .ok_or("no parameters")?;
        for parameter in list.split(',') {
            match parameter.split_whitespace().collect::<Vec<_>>()[..] {
                [".param", ".u64", name] => self.parameters.push((name.to_owned(), 8)),
                [".param", ".u32", name] => self.parameters.push((name.to_owned(), 4)),
                _ => return Err(format!("parameter {parameter:?}")),
            }
        }
        Ok(())
    }

    fn body(&mut self, body: &str) -> Result<(), String> {
        for statement in body.split_terminator(';') {
            let mut statement = statement.trim();
            while let Some((label, rest)) = statement.split_once(':') {
                let here = self.instructions.len();
                self.labels.insert(label.trim().to_owned(), here);
                statement = rest.trim();
            }
            if let Some(names) = statement.strip_prefix(".reg") {
                self.declare(names.trim())?;
            } else if !statement.is_empty() {
                self.instruction(statement)
                    .map_err(|why| format!("{statement}: {why}"))?;
            }
        }
        Ok(())
    }

    fn declare(&mut self, names: &str) -> Result<(), String> {
        let (kind, names) = names.split_once(char::is_whitespace).ok_or("no register")?;
        let bits = match kind {
            ".pred" => 1,
            ".b32" => 32,
            ".b64" => 64,
            other => return Err(format!("registers of type {other}")),
        };
        for name in names.split(',') {
            let number = self.registers.len();
            let known = self
                .registers
                .insert(name.trim().to_owned(), (number, bits));
            if known.is_some() {
                return Err(format!("{name} is declared twice"));
            }
        }
        Ok(())
    }

    fn register(&self, name: &str, bits: u32) -> Result<usize, String> {
        match self.registers.get(name.trim()) {
            Some(&(number, has)) if has == bits => Ok(number),
            Some(&(_, has)) => Err(format!("{name} has {has} bits, not {bits}")),
            None => Err(format!("{name} is not declared")),
        }
    }

    fn operand(&self, text: &str, bits: u32) -> Result<Operand, String> {
        let special = ["%tid.x", "%ntid.x", "%ctaid.x", "%nctaid.x"];
        let text = text.trim();
        if let Some(which) = special.iter().position(|&name| name == text) {
            return Ok(Operand::Special(which));
        }
        match text.parse() {
            Ok(value) => Ok(Operand::Value(value)),
            Err(_) => self.register(text, bits).map(Operand::Register),
        }
    }

    /// The registers of `%a` or `{%a, %b, …}`.
    fn vector(&self, text: &str, bits: u32) -> Result<Vec<usize>, String> {
        let names = text.trim().trim_start_matches('{').trim_end_matches('}');
        names
            .split(',')
            .map(|name| self.register(name, bits))
            .collect()
    }

    /// The address of `[%a]` or `[%a + 8]`.
    fn address(&self, text: &str) -> Result<(Operand, u64), String> {
        let inside = text
            .trim()
            .strip_prefix('[')
            .and_then(|rest| rest.strip_suffix(']'))
            .ok_or("no address")?;
        let (base, offset) = inside.split_once('+').unwrap_or((inside, "0"));
        let offset = offset.trim().parse().map_err(|_| "no offset")?;
        Ok((Operand::Register(self.register(base, 64)?), offset))
    }

    fn instruction(&mut self, statement: &str) -> Result<(), String> {
        let (guard, statement) = match statement.strip_prefix('@') {
            Some(rest) => {
                let (name, rest) = rest.split_once(char::is_whitespace).ok_or("only a guard")?;
                (Some(self.register(name, 1)?), rest.trim())
            }
            None => (None, statement),
        };
        let (name, operands) = statement
            .split_once(char::is_whitespace)
            .unwrap_or((statement, ""));
        let action = self.action(name, operands.trim())?;
        self.instructions.push(Instruction { guard, action });
        Ok(())
    }

    fn action(&mut self, name: &str, operands: &str) -> Result<Action, String> {
        match name {
            "ret" => return Ok(Action::Return),
            "bra" => {
                self.branches
                    .push((self.instructions.len(), operands.to_owned()));
                return Ok(Action::Branch(0));
            }
            _ => {}
        }
        // Registers between braces and commas outside of them.
        let split = match (operands.find('{'), operands.find('}')) {
            (Some(0), Some(end)) => end + 1,
            _ => operands.find(',').ok_or("one operand")?,
        };
        let (first, rest) = operands.split_at(split);
        let rest = rest.trim_start_matches(',').trim();
        let width = |kind: &str| match kind {
            "u8" => Ok((1, 32)),
            "u32" => Ok((4, 32)),
            "u64" => Ok((8, 64)),
            other => Err(format!("type {other}")),
        };
        match name.split('.').collect::<Vec<_>>()[..] {
            ["ld", "param", kind] => {
                let (bytes, bits) = width(kind)?;
                let wanted = rest.trim_start_matches('[').trim_end_matches(']');
                let index = self
                    .parameters
                    .iter()
                    .position(|(name, has)| name == wanted && *has == bytes)
                    .ok_or("no such parameter")?;
                Ok(Action::LoadParameter(self.register(first, bits)?, index))
            }
            ["ld", "global", kind] | ["ld", "global", "v4", kind] => {
                let (bytes, bits) = width(kind)?;
                let (base, offset) = self.address(rest)?;
                let to = self.vector(first, bits)?;
                counted(name, &to, bytes)?;
                Ok(Action::Load(to, base, offset, bytes))
            }
            ["st", "global", kind] | ["st", "global", "v4", kind] => {
                let (bytes, bits) = width(kind)?;
                let (base, offset) = self.address(first)?;
                let from = self.vector(rest, bits)?;
                counted(name, &from, bytes)?;
                Ok(Action::Store(from, base, offset, bytes))
            }
            _ => self.arithmetic(name, first, rest),
        }
    }

    fn arithmetic(&self, name: &str, target: &str, sources: &str) -> Result<Action, String> {
        use Function::*;
        // Bits of the sources and of the target.
        let (function, from, to) = match name {
            "mov.u32" => (Copy, 32, 32),
            // Generic and global addresses are the same numbers.
            "cvta.to.global.u64" => (Copy, 64, 64),
            "cvt.u64.u32" => (Copy, 32, 64),
            "add.u32" => (Add, 32, 32),
            "add.u64" => (Add, 64, 64),
            "sub.u32" => (Sub, 32, 32),
            "mul.lo.u32" => (MulLow, 32, 32),
            "mul.wide.u32" => (MulWide, 32, 64),
            "mad.lo.u32" => (MadLow, 32, 32),
            "and.b32" => (And, 32, 32),
            "and.b64" => (And, 64, 64),
            "or.b64" => (Or, 64, 64),
            "shl.b32" => (ShiftLeft, 32, 32),
            "shr.u32" => (ShiftRight, 32, 32),
            "selp.b64" => (Select, 64, 64),
            "setp.ne.u32" => (IsNotEqual, 32, 1),
            "setp.ne.u64" => (IsNotEqual, 64, 1),
            "setp.ge.u32" => (IsAtLeast, 32, 1),
            "setp.ge.u64" => (IsAtLeast, 64, 1),
            _ => return Err("unknown instruction".to_owned()),
        };
        let sources: Vec<&str> = sources.split(',').collect();
        let wanted = match function {
            Copy => 1,
            MadLow | Select => 3,
            _ => 2,
        };
        if sources.len() != wanted {
            return Err(format!("{} sources", sources.len()));
        }
        let sources = sources
            .iter()
            .enumerate()
            .map(|(i, text)| {
                let bits = match function {
                    Select if i == 2 => 1,
                    ShiftLeft | ShiftRight if i == 1 => 32,
                    _ => from,
                };
                self.operand(text, bits)
            })
            .collect::<Result<_, _>>()?;
        Ok(Action::Compute(
            function,
            self.register(target, to)?,
            sources,
            to,
        ))
    }

    fn finish(mut self) -> Result<Program, String> {
        for (at, label) in &self.branches {
            let target = self.labels.get(label).ok_or(format!("no label {label}"))?;
            self.instructions[*at].action = Action::Branch(*target);
        }
        let last = self.instructions.last().ok_or("no instructions")?;
        if !matches!(last.action, Action::Return | Action::Branch(_)) || last.guard.is_some() {
            return Err("it runs past its end".to_owned());
        }
        Ok(Program {
            parameters: self.parameters.iter().map(|(_, bytes)| *bytes).collect(),
            instructions: self.instructions,
            registers: self.registers.len(),
        })
    }
}

/// An access has 16 bytes at most.
fn counted(name: &str, registers: &[usize], bytes: usize) -> Result<(), String> {
    let wanted = if name.contains(".v4.") { 4 } else { 1 };
    if registers.len() == wanted && wanted * bytes <= 16 {
        Ok(())
    } else {
        Err(format!("{} registers of {bytes} bytes", registers.len()))
    }
}

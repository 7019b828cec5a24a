#![allow(dead_code, missing_docs, unreachable_pub, clippy::unwrap_used)]
use postgres::{Client, NoTls};
pub struct Database {
    url: String,
    admin: String,
    name: String,
}
impl Database {
    pub fn create() -> Self {
        let admin = std::env::var("TEST_DATABASE_URL")
            .unwrap_or("postgres://postgres@127.0.0.1:5415/postgres".into());
        let name = format!("op_{}", uuid::Uuid::from_u128(fastrand::u128(..)).simple());
        let mut c = Client::connect(&admin, NoTls).unwrap();
        c.batch_execute(&format!("CREATE DATABASE {name}")).unwrap();
        let url = admin
            .replace("/postgres", &format!("/{name}"))
            .replacen(&format!("/{name}://"), "postgres://", 1)
            .replace(&format!(":/{name}@"), "://postgres@")
            .replace(&format!("//{name}@"), "//postgres@");
        let mut c = Client::connect(&url, NoTls).unwrap();
        c.batch_execute(include_str!("../../schema.sql")).unwrap();
        Self { url, admin, name }
    }
    pub fn client(&self) -> Client {
        Client::connect(&self.url, NoTls).unwrap()
    }
}
impl Drop for Database {
    fn drop(&mut self) {
        let mut c = Client::connect(&self.admin, NoTls).unwrap();
        c.batch_execute(&format!("DROP DATABASE {} WITH (FORCE)", self.name)).unwrap();
    }
}

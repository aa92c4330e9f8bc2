package tmc

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"regexp"
	"strings"
)

// Database is a kind of SQL database, over any driver of database/sql.
type Database struct {
	name           string
	create         func(table) []string
	insert, unless string // the two ends of an INSERT that changes no row if the key is taken
	isNumbered     bool   // $1, $2 instead of ?
	// shortly is run before a fence, so that it does not wait for a transaction that is still open.
	shortly      string
	shortlyTakes bool   // the message id
	byKey        string // makes an UPDATE of some keys leave other rows alone, also in a small table, which would be scanned
	// losesTransactions: after some errors, such as a deadlock, later statements run outside of the transaction.
	losesTransactions bool
}

var (
	// PostgreSQL 14 and newer.
	PostgreSQL = Database{
		name: "PostgreSQL",
		create: func(t table) []string {
			made := []string{fmt.Sprintf("CREATE TABLE IF NOT EXISTS %s (%s)", t.name, strings.ReplaceAll(t.columns, "BINARY_16", "BYTEA"))}
			if t.indexed != "" {
				made = append(made, fmt.Sprintf("CREATE INDEX IF NOT EXISTS %s ON %s (%s)", t.index, t.name, t.indexed))
			}
			return made
		},
		insert: "INSERT", unless: " ON CONFLICT DO NOTHING", isNumbered: true, shortly: "SET LOCAL lock_timeout = '100ms'",
	}
	// MySQL 8 and newer, and MariaDB 10.6 and newer.
	MySQL = Database{
		name: "MySQL",
		create: func(t table) []string {
			columns := strings.ReplaceAll(t.columns, "BINARY_16", "VARBINARY(16)")
			if t.indexed != "" {
				columns += fmt.Sprintf(", INDEX %s (%s)", t.index, t.indexed)
			}
			return []string{fmt.Sprintf("CREATE TABLE IF NOT EXISTS %s (%s) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin", t.name, columns)}
		},
		insert: "INSERT IGNORE", losesTransactions: true, byKey: " FORCE INDEX (PRIMARY)",
		shortly: "SELECT state FROM tmc_ledger WHERE message_id = ? FOR UPDATE NOWAIT", shortlyTakes: true,
	}
)

// sql returns a statement with ? as this database takes it.
func (d Database) sql(statement string) string {
	if !d.isNumbered {
		return statement
	}
	number := 0
	return placeholder.ReplaceAllStringFunc(statement, func(string) string {
		number++
		return fmt.Sprintf("$%d", number)
	})
}

var placeholder = regexp.MustCompile(`\?`)

// marks returns count placeholders: ?, ?, ?
func marks(count int) string { return strings.TrimSuffix(strings.Repeat("?, ", count), ", ") }

// insertUnless returns an INSERT that changes no row if the key is taken.
func (d Database) insertUnless(table, columns string) string {
	return d.sql(fmt.Sprintf("%s INTO %s (%s) VALUES (%s)%s", d.insert, table, columns, marks(strings.Count(columns, ",")+1), d.unless))
}

// hold makes sure that release notices if the database has ended tx meanwhile.
func (d Database) hold(ctx context.Context, tx *sql.Tx) error {
	if !d.losesTransactions {
		return nil
	}
	_, err := tx.ExecContext(ctx, "SAVEPOINT tmc")
	return err
}

// release returns an error if tx is no longer the transaction that hold was called in: part of it may be committed or undone.
func (d Database) release(ctx context.Context, tx *sql.Tx) error {
	if !d.losesTransactions {
		return nil
	}
	if _, err := tx.ExecContext(ctx, "RELEASE SAVEPOINT tmc"); err != nil {
		return fmt.Errorf("tmc: the database ended the transaction before its end, by an error that was ignored or a statement that commits: %w", err)
	}
	return nil
}

// table is one of docs/wire.md, as all clients have it.
type table struct{ name, columns, index, indexed string }

var ledgerTables = []table{
	{
		name: "tmc_ledger",
		columns: `message_id VARCHAR(64) NOT NULL, state SMALLINT NOT NULL, topic VARCHAR(128) NOT NULL, message_key VARCHAR(128) NOT NULL,
			attempt_id BINARY_16 NOT NULL, created_ms BIGINT NOT NULL, settled_ms BIGINT, PRIMARY KEY (message_id)`,
		index: "tmc_ledger_unsettled", indexed: "settled_ms, message_id",
	},
	{
		name:    "tmc_ledger_info",
		columns: "id INTEGER NOT NULL, ledger_id BINARY_16 NOT NULL, horizon_ms BIGINT DEFAULT '0' NOT NULL, PRIMARY KEY (id)",
	},
}

var inboxTables = []table{
	{
		name: "tmc_inbox",
		columns: `subscriber VARCHAR(160) NOT NULL, message_id VARCHAR(64) NOT NULL, received_ms BIGINT NOT NULL,
			PRIMARY KEY (subscriber, message_id)`,
	},
	{
		name: "tmc_inbox_order",
		columns: `line VARCHAR(32) NOT NULL, subscriber VARCHAR(160) NOT NULL, topic VARCHAR(128) NOT NULL, order_key VARCHAR(128) NOT NULL,
			sequence BIGINT NOT NULL, changed_ms BIGINT NOT NULL, PRIMARY KEY (line)`,
	},
}

// createTables makes the tables that are missing. It needs no right to do so where they are there.
func (d Database) createTables(ctx context.Context, db *sql.DB, tables []table) error {
	if d.create == nil || db == nil {
		return errors.New("tmc: give it your *sql.DB, and tmc.PostgreSQL or tmc.MySQL")
	}
	for _, t := range tables {
		if isThere(ctx, db, t.name) {
			continue
		}
		if err := d.createTable(ctx, db, t); err != nil && !isThere(ctx, db, t.name) { // else another process was faster
			return d.failed(err)
		}
	}
	return nil
}

// failed explains an error of the first statements.
func (d Database) failed(err error) error {
	return fmt.Errorf("tmc: the tables for messages cannot be used (is this database %s?): %w", d.name, err)
}

func (d Database) createTable(ctx context.Context, db *sql.DB, t table) error {
	tx, err := db.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	defer tx.Rollback()
	for _, statement := range d.create(t) {
		if _, err := tx.ExecContext(ctx, statement); err != nil {
			return err
		}
	}
	return tx.Commit()
}

func isThere(ctx context.Context, db *sql.DB, table string) bool {
	rows, err := db.QueryContext(ctx, "SELECT 1 FROM "+table+" WHERE 1 = 0")
	return err == nil && rows.Close() == nil
}
